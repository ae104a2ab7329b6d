// An answer's text on the page: Markdown, tinted by how many tokens came at once, each piece leading to its round.

import { h } from "./dom.js";
import { draw, parse } from "./markdown.js";

export const MOST_TINT = 6; // tokens at once; more look the same

export class Answer {
  /** onPick(round): a piece of the text was clicked. */
  constructor(onPick) {
    this.element = h("div", { class: "answer" });
    this.element.addEventListener("click", (event) => {
      const piece = event.target.closest("[data-round]");
      if (piece && getSelection().isCollapsed && !event.target.closest("a")) onPick(Number(piece.dataset.round));
    });
    this.drawn = []; // {start, end, kind, element} of the blocks on the page
  }

  /** Shows text (which only ever grows) with its pieces; see `Run.pieces`. */
  update(text, pieces, isOpen) {
    const found = parse(text, isOpen);
    const leaf = (parent, start, end) => tint(parent, text, pieces, start, end);
    // what lies before the last two blocks cannot change any more
    const kept = Math.max(0, this.drawn.length - 2);
    let same = 0;
    while (same < kept && same < found.length && isSame(this.drawn[same], found[same])) same++;
    for (const { element } of this.drawn.splice(same)) element.remove();
    for (const block of found.slice(same)) {
      const element = draw(block, leaf);
      this.element.append(element);
      this.drawn.push({ start: block.start, end: block.end, kind: block.kind, element });
    }
    this.mark(this.marked);
  }

  /** Underlines what one round wrote; null for none. */
  mark(round) {
    this.marked = round;
    for (const piece of this.element.querySelectorAll(".marked")) piece.classList.remove("marked");
    if (Number.isInteger(round)) {
      for (const piece of this.element.querySelectorAll(`[data-round="${round}"]`)) piece.classList.add("marked");
    }
  }
}

const isSame = (a, b) => a.start === b.start && a.end === b.end && a.kind === b.kind;

function tint(parent, text, pieces, start, end) {
  let low = 0;
  let high = pieces.length; // the first piece that ends behind `start`
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pieces[middle].end > start) high = middle;
    else low = middle + 1;
  }
  for (let k = low; start < end; k++) {
    const piece = pieces[k];
    const to = piece ? Math.min(piece.end, end) : end;
    const part = text.slice(start, to);
    if (!piece || piece.round < 0) parent.append(part);
    else parent.append(h("span", { class: `tint-${Math.min(piece.count, MOST_TINT)}`, "data-round": piece.round }, part));
    start = to;
  }
}
