// The conversation: questions, answers as they are written, and what can be done with them.

import { Answer } from "./answer.js";
import { byId, copies, h, icon, oncePerFrame, say, wordButton } from "./dom.js";
import { Run, count, rate, times } from "./run.js";
import { currentInfo, drawSeed, isSampled, requestFor, settings } from "./settings.js";
import { keepChat } from "./store.js";

const EXAMPLES = [
  "Write a Python class for a stack with push and pop, and show how to use it.",
  "Name three sights in Paris as a list, with one sentence each.",
  "Why do leaves change colour in autumn? Explain it in one short paragraph.",
];

export class Chat {
  /** openRounds(): brings the inspector forward where it does not stand beside the text. */
  constructor(inspector, openRounds) {
    this.inspector = inspector;
    this.openRounds = openRounds;
    this.log = byId("log");
    this.box = byId("question");
    this.begin(null);
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send(this.box.value);
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send(this.box.value);
    });
  }

  /** A conversation that was kept, or a new one. */
  begin(chat) {
    this.stop();
    this.chat = chat ?? { id: crypto.randomUUID?.() ?? String(Math.random()), title: "", when: 0, messages: [] };
    this.turns = []; // one for each assistant message: {element, answer, run, message}
    this.shown = null;
    this.inspector.show(null);
    this.log.replaceChildren();
    for (const message of this.chat.messages) {
      if (message.role === "user") this.log.append(this.question(message.content));
      else this.addTurn(message, null).refresh();
    }
    if (!this.chat.messages.length) this.log.append(this.welcome());
    this.showActions();
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** The conversation was deleted: what is still being written of it is not kept either. */
  forget() {
    this.chat.id = null;
    this.begin(null);
  }

  welcome() {
    const ask = (text) => h("button", { type: "button", class: "example", onclick: () => this.send(text) }, text);
    return h(
      "div",
      { class: "welcome" },
      h("h2", {}, "Ask something"),
      h("p", {}, "What comes several tokens at a time is tinted: the more at once, the deeper."),
      h("div", { class: "examples" }, EXAMPLES.map(ask)),
    );
  }

  question(text) {
    return h("article", { class: "question", "aria-label": "You" }, h("p", { dir: "auto" }, text));
  }

  send(text) {
    if (!text.trim() || !currentInfo()) return;
    if (this.chat.messages.at(-1)?.role === "user") this.takeBack();
    if (!this.chat.messages.length) {
      this.log.replaceChildren();
      this.chat.title = text.trim().split("\n")[0].slice(0, 80);
    }
    this.box.value = "";
    this.box.dispatchEvent(new Event("input")); // its height follows
    this.chat.messages.push({ role: "user", content: text });
    this.log.append(this.question(text));
    this.write();
  }

  /** A question that was not answered goes: many models' templates want question and answer in turn. */
  takeBack() {
    this.chat.messages.pop();
    const asked = [...this.log.querySelectorAll(".question")].at(-1);
    asked.nextElementSibling?.remove();
    asked.remove();
    this.turns = this.turns.filter((turn) => turn.element.isConnected);
  }

  /** The last answer once more. */
  regenerate() {
    const turn = this.turns.pop();
    turn.element.remove();
    if (this.chat.messages.at(-1) === turn.message) this.chat.messages.pop();
    this.write();
  }

  stop() {
    this.abort?.abort();
  }

  get running() {
    return Boolean(this.abort);
  }

  async write() {
    const { drafter } = settings;
    const seed = drawSeed();
    const run = new Run({ drafter, plain: currentInfo().plain_tokens_per_s, seed: isSampled() ? seed : null });
    const messages = this.chat.messages.map(({ role, content }) => ({ role, content }));
    const message = { role: "assistant", content: "" };
    const turn = this.addTurn(message, run);
    const chat = this.chat;
    const abort = new AbortController();
    this.abort = abort;
    this.showActions();
    this.look(turn);
    this.log.scrollTop = this.log.scrollHeight;
    say("The model writes");
    let isDrawn = false;
    const draw = oncePerFrame(() => {
      if (isDrawn || chat !== this.chat) return;
      isDrawn = run.isOver;
      const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80;
      turn.refresh();
      if (this.shown === turn) this.inspector.refresh();
      if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    });
    await run.follow(requestFor(messages, drafter, seed), abort.signal, draw);
    message.content = run.text;
    message.note = note(run);
    if (run.text) chat.messages.push(message); // an answer that never began leaves no gap in the conversation
    chat.when = Date.now();
    if (chat.id && !keepChat(chat)) byId("storage-note").hidden = false;
    if (this.abort !== abort) return; // another conversation has begun
    this.abort = null;
    this.showActions();
    say(run.error ? "" : `${run.state === "stopped" ? "Stopped" : "Finished"}: ${message.note}`);
  }

  addTurn(message, run) {
    const turn = { message, run };
    const look = (round) => {
      this.look(turn, round);
      this.openRounds();
    };
    turn.answer = new Answer(look);
    const status = h("p", { class: "note" });
    turn.actions = h("div", { class: "actions" });
    turn.buttons = {
      rounds: wordButton("tree", "Rounds", () => look(null)),
      copy: copies(wordButton("copy", "Copy"), () => run?.text ?? message.content),
      again: wordButton("again", "Regenerate", () => this.regenerate()),
      retry: wordButton("again", "Try again", () => this.regenerate()),
    };
    const failure = h("div", { class: "failure", role: "alert" });
    turn.element = h("article", { class: "turn", "aria-label": "Model" }, turn.answer.element, failure, h("div", { class: "foot" }, status, turn.actions));
    turn.refresh = () => {
      if (!run) {
        turn.answer.update(message.content, [], false);
        status.textContent = message.note ?? "";
        return;
      }
      turn.element.classList.toggle("is-waiting", run.state === "waiting");
      turn.element.classList.toggle("is-running", run.state === "running");
      turn.answer.update(run.text, run.pieces, !run.isOver);
      status.textContent = note(run);
      if (run.error && !failure.firstChild) failure.append(icon("alert"), h("p", {}, run.error.message));
    };
    this.turns.push(turn);
    this.log.append(turn.element);
    turn.refresh();
    return turn;
  }

  /** What is possible now, under each answer. */
  showActions() {
    const last = this.turns.at(-1);
    for (const turn of this.turns) {
      const { rounds, copy, again, retry } = turn.buttons;
      const isWriting = this.running && turn === last;
      const text = turn.run?.text ?? turn.message.content;
      const possible = [
        turn.run && (isWriting || turn.run.rounds.length > 0) && rounds,
        !isWriting && text && copy,
        !isWriting && turn === last && (turn.run?.error ? retry : again),
      ];
      turn.actions.replaceChildren(...possible.filter(Boolean));
    }
    const send = byId("send");
    send.querySelector(".label").textContent = this.running ? "Stop" : "Send";
    send.querySelector("use").setAttribute("href", this.running ? "#icon-stop" : "#icon-send");
    byId("new-chat").disabled = this.running;
  }

  /** Shows an answer's rounds. */
  look(turn, round = null) {
    if (!turn.run) return;
    if (this.shown && this.shown !== turn) this.shown.answer.mark(null);
    this.shown = turn;
    this.inspector.show(turn.run, round);
  }

  /** Called by the inspector: which round it draws. */
  mark(round) {
    this.shown?.answer.mark(round);
  }
}

function note(run) {
  const { perSecond, M, speedUp, tokens } = run.figures;
  const parts = [run.drafter];
  if (run.state === "waiting") return "The model reads the question";
  if (run.state === "failed" && !run.text) return "";
  if (perSecond) parts.push(`${rate(perSecond)} tokens/s`, `M ${M.toFixed(2)}`);
  if (speedUp) parts.push(`${times(speedUp)} plain`);
  if (run.isOver && run.text) parts.push(count(tokens, "token"));
  if (run.isOver && run.seed !== null) parts.push(`seed ${run.seed}`);
  if (run.state === "stopped") parts.push("stopped");
  if (run.finish === "length") parts.push("cut at its length limit");
  return parts.join(" · ");
}
