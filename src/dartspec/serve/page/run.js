// One answer: its text, its rounds, and what follows from them. Data only; it draws nothing.

import { stream } from "./api.js";

export const STAGES = ["draft", "search", "verify", "pick", "rest"];

/** How fast, in words of one line. */
export const rate = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));
export const times = (value) => `${value.toFixed(value >= 10 ? 1 : 2)}×`;
export const duration = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms >= 100 ? 0 : 1)} ms`);
export const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

export class Run {
  /** plain: tokens a second of plain decoding, or null. seed: null where the text does not depend on it. */
  constructor({ drafter, plain, seed }) {
    this.drafter = drafter;
    this.plain = plain;
    this.seed = seed;
    this.text = "";
    this.rounds = [];
    this.pieces = []; // {start, end, round, count}: which round wrote text[start:end], and how many tokens came at once
    this.usage = null;
    this.state = "waiting"; // then "running", and at last "done", "stopped" or "failed"
    this.finish = null;
    this.error = null;
  }

  get isOver() {
    return this.state !== "waiting" && this.state !== "running";
  }

  /** Streams the answer into this run; `changed` is called after each chunk and at the end. Never throws. */
  async follow(body, signal, changed) {
    try {
      for await (const chunk of stream(body, signal)) {
        this.take(chunk);
        changed();
      }
      this.state = "done";
    } catch (error) {
      this.state = signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) this.error = error;
    }
    changed();
  }

  take(chunk) {
    this.state = "running";
    const choice = chunk.choices?.[0];
    const added = choice?.delta?.content || "";
    const round = chunk.dartspec?.round;
    const start = this.text.length;
    this.text += added;
    if (round) {
      const ms = STAGES.map((stage) => round.times_ms?.[stage] || 0);
      this.rounds.push({ ...round, ms, sum: ms.reduce((a, b) => a + b, 0), depth: depth(round.tree.parents) });
    }
    if (added) {
      const where = { start, end: this.text.length, round: round ? this.rounds.length - 1 : -1 };
      this.pieces.push({ ...where, count: round ? round.new.length : 1 });
    }
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (chunk.usage) this.usage = chunk.usage;
  }

  /** Milliseconds by stage, over all rounds. */
  get stageSums() {
    return STAGES.map((_, i) => this.rounds.reduce((sum, round) => sum + round.ms[i], 0));
  }

  /** The figures so far, from the rounds' own time: waiting for another request's round is none of it. */
  get figures() {
    const committed = this.rounds.reduce((sum, round) => sum + round.new.length, 0);
    const ms = this.rounds.reduce((sum, round) => sum + round.sum, 0);
    const perSecond = ms > 0 ? (1000 * committed) / ms : null;
    return {
      tokens: this.usage?.completion_tokens ?? committed + (this.text ? 1 : 0), // the first belongs to no round
      rounds: this.rounds.length,
      ms,
      M: this.rounds.length ? committed / this.rounds.length : null,
      perSecond,
      speedUp: perSecond && this.plain ? perSecond / this.plain : null,
    };
  }

  /** Entry k: of the rounds whose tree reached k + 1 tokens deep, in how many so many were accepted. */
  get byPosition() {
    const found = [];
    for (const round of this.rounds) {
      for (let k = 0; k < round.depth; k++) {
        found[k] ??= { tried: 0, accepted: 0 };
        found[k].tried++;
        if (round.num_accepted > k) found[k].accepted++;
      }
    }
    return found;
  }
}

function depth(parents) {
  const depths = [];
  parents.forEach((parent, i) => (depths[i] = parent < 0 ? 0 : depths[parent] + 1));
  return Math.max(...depths);
}
