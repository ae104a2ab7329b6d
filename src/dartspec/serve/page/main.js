// Brings the page to life: views, theme, history, and what the server says about itself.

import { ServerError, getInfo, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, h, iconButton } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Race } from "./race.js";
import { rate } from "./run.js";
import { inWords, settings, useInfo, wireSettings } from "./settings.js";
import { forgetAll, forgetChat, readChats, readTheme, writeSettings, writeTheme } from "./store.js";

const WIDE = matchMedia("(min-width: 68rem)"); // as in style.css: the inspector stands beside the text
const THEMES = ["auto", "light", "dark"];

let chat = null;
let race = null;
const chatInspector = new Inspector(byId("inspector-body"), (round) => chat?.mark(round));
const raceInspector = new Inspector(byId("race-inspector"), (round) => race?.mark(round));
chat = new Chat(chatInspector, openSheet);
race = new Race(raceInspector);

// -- views ------------------------------------------------------------------------------------------------------------

function showView() {
  const name = location.hash === "#race" ? "race" : "chat";
  document.body.dataset.view = name;
  for (const link of document.querySelectorAll(".views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("chat-view").hidden = name !== "chat";
  byId("race-view").hidden = name !== "race";
  document.title = name === "race" ? "Side by side – dartspec" : "Chat – dartspec";
}

addEventListener("hashchange", showView);
showView();

// -- the inspector as a sheet on narrow screens -----------------------------------------------------------------------

const sheet = byId("inspector");
let opener = null;

function openSheet() {
  if (WIDE.matches) return;
  opener = document.activeElement;
  sheet.classList.add("is-open");
  byId("talk").inert = true;
  byId("close-inspector").focus();
  chatInspector.refresh();
}

function closeSheet() {
  if (!sheet.classList.contains("is-open")) return;
  sheet.classList.remove("is-open");
  byId("talk").inert = false;
  opener?.focus();
}

byId("close-inspector").addEventListener("click", closeSheet);
WIDE.addEventListener("change", closeSheet);

addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (sheet.classList.contains("is-open")) closeSheet();
  else if (document.body.dataset.view === "chat") chat.stop();
  else race.abort?.abort();
});

// -- theme, tint ------------------------------------------------------------------------------------------------------

function setTheme(theme) {
  const known = THEMES.includes(theme) ? theme : "auto";
  document.documentElement.dataset.theme = known;
  byId("theme").setAttribute("aria-label", `Colours: ${known}`);
  byId("theme").title = `Colours: ${known}`;
  byId("theme").querySelector("use").setAttribute("href", `#icon-${known}`);
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(next);
  writeTheme(next);
});
setTheme(readTheme());

function setTint(isOn) {
  document.documentElement.dataset.tint = isOn ? "on" : "off";
  byId("tint").checked = isOn;
}

byId("tint").addEventListener("change", ({ target }) => {
  settings.tint = target.checked;
  setTint(target.checked);
  writeSettings(settings);
});
setTint(settings.tint !== false);

// -- the boxes --------------------------------------------------------------------------------------------------------

for (const box of document.querySelectorAll("textarea")) {
  box.addEventListener("input", () => {
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
  });
}

wireSettings(() => {
  for (const label of document.querySelectorAll("[data-settings-in-words]")) label.textContent = inWords();
});

// -- history ----------------------------------------------------------------------------------------------------------

const past = byId("history");

function listChats() {
  const open = (kept) => () => {
    past.close();
    location.hash = "#chat";
    chat.begin(kept);
  };
  const entries = readChats().map((kept) => {
    const remove = iconButton("delete", `Delete “${kept.title}”`, () => {
      forgetChat(kept.id);
      if (kept.id === chat.chat.id) chat.forget();
      listChats();
    });
    const when = h("time", {}, new Date(kept.when).toLocaleDateString(undefined, { dateStyle: "medium" }));
    return h("li", {}, h("button", { type: "button", class: "entry", onclick: open(kept) }, h("span", {}, kept.title), when), remove);
  });
  byId("chats").replaceChildren(...entries);
  byId("no-chats").hidden = entries.length > 0;
  byId("forget-all").hidden = entries.length === 0;
}

byId("open-history").addEventListener("click", () => {
  listChats();
  past.showModal();
});
byId("forget-all").addEventListener("click", () => {
  forgetAll();
  chat.forget();
  listChats();
});
byId("new-chat").addEventListener("click", () => {
  location.hash = "#chat";
  chat.begin(null);
  byId("question").focus();
});
for (const button of document.querySelectorAll("dialog [data-closes]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
}

// -- the server -------------------------------------------------------------------------------------------------------

async function greet() {
  const bar = byId("trouble");
  try {
    const info = await getInfo();
    useInfo(info);
    const plain = info.plain_tokens_per_s;
    byId("model").textContent = info.model;
    byId("model").title = [info.dtype, info.device, plain ? `plain decoding ${rate(plain)} tokens/s` : null].filter(Boolean).join(", ");
    byId("machine").textContent = [
      `${info.model}, ${info.dtype} on ${info.device}`,
      plain ? `plain decoding: ${rate(plain)} tokens/s, measured when the server started` : "plain decoding was not measured",
      `dartspec ${info.version}`,
    ].join(" · ");
    bar.hidden = true;
    for (const button of document.querySelectorAll("#send, #race-go")) button.disabled = false;
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    const wantsKey = error.status === 401;
    if (error.status === 503) setTimeout(greet, 500); // it is still starting
    byId("trouble-text").textContent = wantsKey ? "This server asks for its API key." : error.message;
    byId("key-form").hidden = !wantsKey;
    byId("retry").hidden = wantsKey;
    bar.hidden = false;
  }
}

byId("retry").addEventListener("click", greet);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  greet();
});
greet();
if (matchMedia("(pointer: fine)").matches) byId("question").focus(); // elsewhere a keyboard would cover half the page
