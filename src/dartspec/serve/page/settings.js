// How the model is asked: the settings, their form, and the request that follows from them.

import { byId, h } from "./dom.js";
import { DEFAULTS, readSettings, writeSettings } from "./store.js";

export const settings = readSettings();
let info = null;

/** Fills every list of drafters; a drafter that the server no longer has gives way to its default. */
export function useInfo(found) {
  info = found;
  if (!info.drafters.includes(settings.drafter)) settings.drafter = info.default_drafter;
  for (const list of document.querySelectorAll("select[data-drafters]")) {
    list.replaceChildren(...info.drafters.map((name) => h("option", { value: name }, name)));
  }
  byId("drafter").value = settings.drafter;
  byId("left-drafter").value = info.drafters.includes("plain") ? "plain" : info.drafters[0];
  byId("right-drafter").value = info.default_drafter;
  byId("set-nodes").max = info.max_nodes;
  byId("nodes-hint").textContent = `Empty: as many as pay. 0: no drafts. ${info.max_nodes} at most.`;
  if (info.context_length) byId("set-max-tokens").max = info.context_length;
}

export const currentInfo = () => info;

/** The seed that is used: the one set, or a fresh one, so that it can be shown and used again. */
export const drawSeed = () => settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0];

/** Whether the text depends on the seed. */
export const isSampled = () => settings.temperature > 0;

/** The body of a request. */
export function requestFor(messages, drafter, seed) {
  return {
    model: info.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: settings.temperature,
    top_p: settings.topP,
    seed,
    max_tokens: settings.maxTokens,
    speculate: settings.nodes === null ? "auto" : settings.nodes === 0 ? "off" : settings.nodes,
    dartspec: { drafter, rounds: true },
  };
}

/** One line for the button that opens the form. */
export function inWords() {
  const { temperature, topP, seed, nodes } = settings;
  const parts = [temperature === 0 ? "greedy" : `temperature ${temperature}`];
  if (temperature > 0 && topP < 1) parts.push(`top-p ${topP}`);
  if (temperature > 0 && seed !== null) parts.push(`seed ${seed}`);
  if (nodes !== null) parts.push(nodes === 0 ? "no drafts" : `${nodes} nodes`);
  return parts.join(", ");
}

const FIELDS = { "set-temperature": "temperature", "set-top-p": "topP", "set-seed": "seed", "set-nodes": "nodes", "set-max-tokens": "maxTokens" };

/** Wires the form in its dialog; `changed` is called after each change that holds. */
export function wireSettings(changed) {
  const dialog = byId("settings");
  const fill = () => {
    for (const [id, name] of Object.entries(FIELDS)) byId(id).value = settings[name] ?? "";
  };
  for (const button of document.querySelectorAll("[data-opens=settings]")) {
    button.addEventListener("click", () => {
      fill();
      dialog.showModal();
    });
  }
  for (const [id, name] of Object.entries(FIELDS)) {
    byId(id).addEventListener("change", ({ target }) => {
      if (!target.reportValidity()) return;
      settings[name] = target.value === "" ? DEFAULTS[name] : Number(target.value);
      if (target.value === "") fill();
      writeSettings(settings);
      changed();
    });
  }
  byId("drafter").addEventListener("change", ({ target }) => {
    settings.drafter = target.value;
    writeSettings(settings);
    changed();
  });
  byId("reset-settings").addEventListener("click", () => {
    const { drafter, tint } = settings;
    Object.assign(settings, DEFAULTS, { drafter, tint });
    writeSettings(settings);
    fill();
    changed();
  });
  changed();
}
