// Why an answer was fast: its figures, each round's tree, where the time went, and how far drafts were accepted.

import { h, iconButton, svg } from "./dom.js";
import { STAGES, count, duration, rate, times } from "./run.js";
import { drawTree, heightFor, readable } from "./tree.js";

const LIVE_MS = 120; // between two trees while an answer is written
const MOST_POSITIONS = 10;

export class Inspector {
  /** Draws into `root`. onRound(round): the round that is looked at, a number, or null. */
  constructor(root, onRound) {
    this.root = root;
    this.onRound = onRound;
    this.run = null;
    this.at = 0;
    this.follows = true; // the newest round, while one is being written
    this.drawnAt = 0;
    this.build();
    new ResizeObserver(() => this.run?.rounds.length && this.drawRound()).observe(this.scroller);
    this.show(null);
  }

  build() {
    this.figures = ["Against plain", "Tokens a second", "Tokens a round (M)", "Rounds"].map((name) => {
      const value = h("dd", {}, "–");
      return { value, element: h("div", {}, h("dt", {}, name), value) };
    });
    this.title = h("h3", {}, "Round");
    this.back = iconButton("back", "Round before", () => this.goTo(this.at - 1));
    this.forth = iconButton("forth", "Next round", () => this.goTo(this.at + 1));
    this.range = h("input", { type: "range", min: 1, max: 1, step: 1, value: 1, "aria-label": "Round" });
    this.range.addEventListener("input", () => this.goTo(this.range.value - 1));
    this.strip = svg("svg", { class: "strip", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.scroller = h("div", { class: "scroller", tabindex: "0", role: "img" });
    this.sentence = h("p", { class: "sentence" });
    const key = (kind, text) => h("li", {}, h("span", { class: `key ${kind}`, "aria-hidden": "true" }), text);
    this.bars = [h("div", { class: "bar", "aria-hidden": "true" }), h("div", { class: "bar", "aria-hidden": "true" })];
    this.stageBody = h("tbody");
    this.positions = h("ol", { class: "positions" });
    this.full = h(
      "div",
      { class: "full" },
      h("dl", { class: "figures" }, this.figures.map((figure) => figure.element)),
      h(
        "section",
        { class: "round", "aria-label": "The round, drawn" },
        h("div", { class: "round-head" }, this.title, h("div", { class: "steps" }, this.back, this.forth)),
        h("div", { class: "scrub" }, this.strip, this.range),
        this.sentence,
        this.scroller,
        h("ul", { class: "keys" }, key("accepted", "accepted"), key("bonus", "bonus: the model’s own"), key("rejected", "rejected")),
      ),
      h(
        "section",
        { class: "stages", "aria-label": "Where the time went" },
        h("h3", {}, "Time"),
        h("div", { class: "bar-row" }, h("span", {}, "Round"), this.bars[0]),
        h("div", { class: "bar-row" }, h("span", {}, "All"), this.bars[1]),
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, h("th", {}, "Stage"), h("th", {}, "This round"), h("th", {}, "All rounds"), h("th", {}, "Share"))),
          this.stageBody,
        ),
      ),
      h("section", { class: "accepted", "aria-label": "Acceptance by position" }, h("h3", {}, "Accepted by position, in %"), this.positions),
    );
    this.example = h("div", { class: "example-tree", role: "img", "aria-label": "An example: of five drafted tokens, “sky” and “is” are accepted; the model adds “blue”." });
    this.empty = h(
      "div",
      { class: "empty" },
      h("h3", {}, "How it is fast"),
      h("p", {}, "In each round a small drafter guesses a tree of next tokens. The model checks the whole tree at once, keeps the path that it would have written itself, and adds one token of its own, the bonus."),
      this.example,
      h("p", {}, "The text is the same as without drafts. The rounds of an answer appear here as it is written; click a piece of its text to see the round that wrote it."),
    );
    this.root.append(this.empty, this.full);
  }

  /** Looks at a run from its newest round on, or at nothing. */
  show(run, round = null) {
    this.run = run;
    this.follows = round === null;
    this.at = round ?? Math.max(0, (run?.rounds.length ?? 0) - 1);
    this.drawnAt = 0;
    this.refresh();
  }

  goTo(round) {
    const last = this.run.rounds.length - 1;
    this.at = Math.min(Math.max(round, 0), last);
    this.follows = this.at === last;
    this.drawRound();
    this.drawStages();
  }

  /** Draws what is new. */
  refresh() {
    const rounds = this.run?.rounds.length ?? 0;
    this.full.hidden = rounds === 0;
    this.empty.hidden = rounds > 0;
    if (!rounds) {
      if (!this.example.firstChild) this.example.append(drawTree(EXAMPLE, 480, 200, fontOf(this.example)));
      this.onRound(null);
      return;
    }
    const { speedUp, perSecond, M } = this.run.figures;
    const shown = [speedUp && times(speedUp), perSecond && rate(perSecond), M && M.toFixed(2), String(rounds)];
    this.figures.forEach(({ value }, i) => (value.textContent = shown[i] || "–"));
    const now = performance.now();
    if (!this.run.isOver && now - this.drawnAt < LIVE_MS) return;
    this.drawnAt = now;
    if (this.follows) this.at = rounds - 1;
    this.drawRound();
    this.drawStages();
    this.drawPositions();
  }

  drawRound() {
    const { rounds } = this.run;
    const round = rounds[this.at];
    this.title.textContent = `Round ${this.at + 1} of ${rounds.length}`;
    this.back.disabled = this.at === 0;
    this.forth.disabled = this.at === rounds.length - 1;
    this.drawStrip();
    this.scroller.style.setProperty("--height", `${heightFor(rounds)}px`);
    const room = [this.scroller.clientWidth || 480, this.scroller.clientHeight || 320];
    this.scroller.replaceChildren(drawTree(round, ...room, fontOf(this.scroller)));
    const words = describe(round);
    this.sentence.textContent = words;
    const texts = round.new.map((token) => token.text);
    this.scroller.setAttribute("aria-label", `Tree of round ${this.at + 1}. ${words} Written: ${texts.join("")}`);
    this.range.max = rounds.length;
    this.range.value = this.at + 1;
    const written = texts.map((text) => readable(text).map(([part]) => part).join("")).join(" ");
    this.range.setAttribute("aria-valuetext", `Round ${this.at + 1} of ${rounds.length}: ${count(texts.length, "token")}, ${written}`);
    this.onRound(this.at);
  }

  /** One bar a round, as high as the tokens that it wrote; the slider's thumb lies over the one that is looked at. */
  drawStrip() {
    const { rounds } = this.run;
    const most = Math.max(...rounds.map((round) => round.new.length));
    const gap = rounds.length > 160 ? 0 : 0.18;
    const bar = (round, i) => `M${i + gap / 2} ${most}V${most - round.new.length}H${i + 1 - gap / 2}V${most}Z`;
    this.strip.setAttribute("viewBox", `0 0 ${rounds.length} ${most}`);
    this.strip.replaceChildren(
      svg("path", { class: "all", d: rounds.map(bar).join("") }),
      svg("path", { class: "one", d: bar(rounds[this.at], this.at) }),
    );
    const width = this.range.clientWidth / rounds.length;
    this.range.style.setProperty("--thumb", `${Math.max(width, 4)}px`);
  }

  drawStages() {
    const { ms, sum } = this.run.rounds[this.at];
    const sums = this.run.stageSums;
    const whole = sums.reduce((a, b) => a + b, 0);
    const parts = (values, total) =>
      values.map((value, i) => {
        const part = h("span", { class: `stage-${STAGES[i]}` });
        part.style.flexGrow = total ? value / total : 0;
        return part;
      });
    this.bars[0].replaceChildren(...parts(ms, sum));
    this.bars[1].replaceChildren(...parts(sums, whole));
    const row = (name, cells, kind) =>
      h(
        "tr",
        { class: kind ? null : "sum" },
        h("th", { scope: "row" }, kind && h("span", { class: `key stage-${kind}`, "aria-hidden": "true" }), name),
        cells.map((cell) => h("td", {}, cell)),
      );
    const share = (i) => `${Math.round((100 * sums[i]) / (whole || 1))}%`;
    this.stageBody.replaceChildren(
      ...STAGES.map((name, i) => row(name, [duration(ms[i]), duration(sums[i]), share(i)], name)),
      row("sum", [duration(sum), duration(whole), ""], null),
    );
  }

  drawPositions() {
    const found = this.run.byPosition.slice(0, MOST_POSITIONS);
    this.positions.replaceChildren(
      ...found.map(({ tried, accepted }, k) => {
        const share = Math.round((100 * accepted) / tried);
        const bar = h("span", { class: "column" });
        bar.style.height = `${Math.max(share, 2)}%`;
        return h(
          "li",
          { title: `${accepted} of ${count(tried, "round")}` },
          h("span", { class: "hidden" }, `Position ${k + 1}: ${share}%, ${accepted} of ${count(tried, "round")}`),
          h("span", { "aria-hidden": "true" }, String(share)),
          h("span", { class: "well", "aria-hidden": "true" }, bar),
          h("span", { class: "number", "aria-hidden": "true" }, String(k + 1)),
        );
      }),
      ...(found.length ? [] : [h("li", { class: "none" }, "Nothing was drafted.")]),
    );
  }
}

function fontOf(element) {
  const { fontSize, fontFamily } = getComputedStyle(element);
  return `${fontSize} ${fontFamily}`;
}

const EXAMPLE = {
  num_drafted: 5,
  num_accepted: 2,
  path: [0, 1, 3],
  new: [" sky", " is", " blue"].map((text) => ({ text })),
  tree: { texts: ["The", " sky", " sea", " is", " looks", " was"], parents: [-1, 0, 0, 1, 1, 1], probs: [1, 0.61, 0.22, 0.7, 0.14, 0.06] },
};

function describe(round) {
  if (!round.num_drafted) return "Nothing drafted: one plain step, one token.";
  const hasBonus = round.new.length === round.path.length;
  const kept = `${round.num_drafted} drafted, ${round.num_accepted} accepted`;
  return hasBonus ? `${kept} and the bonus: ${count(round.new.length, "token")}.` : `${kept}; the answer ended here.`;
}
