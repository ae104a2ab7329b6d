// What the browser remembers: settings and conversations. Nothing of it is sent anywhere but as part of a question.

const MOST_CHATS = 100;

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`dartspec.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Whether the browser could keep it: private windows may have no storage, and it may be full. */
function write(name, value) {
  try {
    localStorage.setItem(`dartspec.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Temperature 0 is greedy. nodes: null is "auto", 0 is none. seed: null draws one. */
export const DEFAULTS = { drafter: null, nodes: null, temperature: 0, topP: 1, seed: null, maxTokens: 512, tint: true };

export function readSettings() {
  const found = read("settings", {});
  return { ...DEFAULTS, ...(typeof found === "object" && !Array.isArray(found) ? found : {}) };
}

export const writeSettings = (settings) => write("settings", settings);

export const readTheme = () => read("theme", "auto");
export const writeTheme = (theme) => write("theme", theme);

/** {id, title, when, messages: [{role, content, note}]}, newest first. */
export function readChats() {
  const found = read("chats", []);
  const isChat = (chat) => chat && typeof chat.title === "string" && Array.isArray(chat.messages) && chat.messages.every(isMessage);
  return Array.isArray(found) ? found.filter(isChat) : [];
}

const isMessage = (m) => m && ["user", "assistant"].includes(m.role) && typeof m.content === "string";

/** Puts a chat first. Returns whether the browser could keep it; the oldest make room where space is short. */
export function keepChat(chat) {
  const chats = [chat, ...readChats().filter((other) => other.id !== chat.id)].slice(0, MOST_CHATS);
  while (!write("chats", chats)) {
    if (chats.length === 1) return false;
    chats.pop();
  }
  return true;
}

export const forgetChat = (id) => write("chats", readChats().filter((chat) => chat.id !== id));
export const forgetAll = () => write("chats", []);
