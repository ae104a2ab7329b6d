// The same prompt and seed with two drafters: the same text, at two speeds.

import { Answer } from "./answer.js";
import { byId, h, icon, oncePerFrame, say } from "./dom.js";
import { Run, count, duration, rate, times } from "./run.js";
import { currentInfo, drawSeed, isSampled, requestFor } from "./settings.js";

export class Race {
  constructor(inspector) {
    this.inspector = inspector;
    this.lanes = ["left", "right"].map((side) => this.lane(side));
    this.verdict = byId("verdict");
    this.box = byId("race-question");
    this.looked = this.lanes[1];
    byId("race").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.start(this.box.value);
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.abort) this.start(this.box.value);
    });
  }

  lane(side) {
    const lane = { side, run: null, list: byId(`${side}-drafter`) };
    lane.figures = Object.fromEntries(
      ["speed", "m", "rounds", "time"].map((name) => [name, byId(side).querySelector(`[data-figure=${name}]`)]),
    );
    lane.progress = byId(side).querySelector(".progress span");
    lane.failure = byId(side).querySelector(".failure");
    lane.home = byId(side).querySelector(".lane-text");
    lane.button = byId(side).querySelector("[data-rounds]");
    lane.button.addEventListener("click", () => {
      this.look(lane);
      byId("race-rounds").scrollIntoView({ block: "start" });
    });
    return lane;
  }

  async start(text) {
    if (!text.trim() || !currentInfo()) return;
    const seed = drawSeed();
    const abort = new AbortController();
    this.abort = abort;
    this.verdict.hidden = true;
    this.showButton();
    say("Both write");
    const draw = oncePerFrame(() => this.refresh());
    for (const lane of this.lanes) {
      lane.run = new Run({ drafter: lane.list.value, plain: currentInfo().plain_tokens_per_s, seed: isSampled() ? seed : null });
      lane.answer = new Answer((round) => this.look(lane, round));
      lane.home.replaceChildren(lane.answer.element);
      lane.home.dataset.drafter = lane.run.drafter; // its heading where both stand below each other
      lane.failure.replaceChildren();
      lane.list.disabled = true;
    }
    const drafting = this.lanes.filter((lane) => lane.run.drafter !== "plain");
    this.look(drafting.at(-1) ?? this.lanes[1]);
    const messages = [{ role: "user", content: text }];
    await Promise.all(
      this.lanes.map(({ run }) => run.follow(requestFor(messages, run.drafter, seed), abort.signal, draw)),
    );
    this.abort = null;
    for (const lane of this.lanes) lane.list.disabled = false;
    this.refresh();
    this.showButton();
    this.judge();
  }

  showButton() {
    const button = byId("race-go");
    button.querySelector(".label").textContent = this.abort ? "Stop" : "Race";
    button.querySelector("use").setAttribute("href", this.abort ? "#icon-stop" : "#icon-race");
  }

  refresh() {
    const tokens = this.lanes.map((lane) => lane.run.figures.tokens);
    const most = Math.max(...tokens, 1);
    this.lanes.forEach((lane, i) => {
      const { run, figures } = lane;
      const { perSecond, M, rounds, ms } = run.figures;
      lane.answer.update(run.text, run.pieces, !run.isOver);
      figures.speed.textContent = perSecond ? rate(perSecond) : "–";
      figures.m.textContent = M ? M.toFixed(2) : "–";
      figures.rounds.textContent = rounds ? String(rounds) : "–";
      figures.time.textContent = ms ? duration(ms) : "–";
      lane.progress.style.width = `${(100 * tokens[i]) / most}%`;
      lane.button.hidden = !rounds;
      if (run.error && !lane.failure.firstChild) lane.failure.append(icon("alert"), h("p", {}, run.error.message));
    });
    this.inspector.refresh();
  }

  /** What came out, in one sentence and two bars. */
  judge() {
    const runs = this.lanes.map((lane) => lane.run);
    if (runs.some((run) => run.state === "failed" || !run.figures.perSecond)) return;
    const [a, b] = runs.map((run) => run.figures.perSecond);
    const [fast, slow] = a > b ? runs : [...runs].reverse();
    const names = runs[0].drafter === runs[1].drafter ? ["The faster", "the other"] : [fast.drafter, slow.drafter];
    const ratio = fast.figures.perSecond / slow.figures.perSecond;
    const line = `${names[0]} writes ${times(ratio)} as fast as ${names[1]}.`;
    const longest = Math.max(...runs.map((run) => run.figures.ms / run.figures.tokens));
    const bars = runs.map((run) => {
      const each = run.figures.ms / run.figures.tokens;
      const bar = h("span", { class: run === fast ? "bar-fill fast" : "bar-fill" });
      bar.style.width = `${(100 * each) / longest}%`;
      return h("li", {}, h("span", {}, run.drafter), h("span", { class: "track", "aria-hidden": "true" }, bar), h("span", { class: "amount" }, `${duration(each)} a token`));
    });
    const sameness = h("p", { class: "sameness" }, ...compare(...runs));
    this.verdict.replaceChildren(h("p", { class: "line" }, line), sameness, h("ul", { class: "verdict-bars" }, bars));
    this.verdict.hidden = false;
    say(`${line} ${sameness.textContent}`);
  }

  look(lane, round = null) {
    if (!lane.run) return;
    if (this.looked !== lane) this.looked.answer?.mark(null);
    this.looked = lane;
    byId("race-rounds-of").textContent = lane.run.drafter;
    byId("race-rounds").hidden = false;
    this.inspector.show(lane.run, round);
  }

  /** Called by the inspector: which round it draws. */
  mark(round) {
    this.looked?.answer?.mark(round);
  }
}

/** Says truly whether both texts are the same. */
function compare(one, other) {
  const [a, b] = [one.text, other.text];
  const shared = Math.min(a.length, b.length);
  let at = 0;
  while (at < shared && a[at] === b[at]) at++;
  if (a === b && one.state === "done" && other.state === "done") {
    const seed = one.seed === null ? "" : `, seed ${one.seed}`;
    return [icon("check"), `The same text: ${count(a.length, "character")}${seed}.`];
  }
  if (at === shared && (one.state === "stopped" || other.state === "stopped")) {
    return [icon("check"), `Stopped. The same text as far as both came: ${count(shared, "character")}.`];
  }
  const isExact = currentInfo().dtype === "float32";
  const why = isExact ? "" : " In half precision, rounding can part two texts where two tokens are nearly tied.";
  return [icon("alert"), `The texts part after ${count(at, "character")}.${why}`];
}
