// One round's tree as a drawing: the accepted path is the straight line at the top, what was rejected hangs below it.

import { svg } from "./dom.js";

const ROW = 25;
const PILL = 20;
const GAPS = [26, 14]; // between columns, for the branches: the narrower where space is short
const PAD = 2;
const MOST_SHOWN = 18; // characters of a word
const MOST_RUNS = 7; // words and spaces of a token
const LEAST_ROWS = 4;
const LEAST_SCALE = 0.72;

const brush = document.createElement("canvas").getContext("2d");

/** A token as it can be read: spaces and line breaks as signs, in runs of [text, isSign]. */
export function readable(text) {
  const signs = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };
  const runs = [];
  for (const [part] of text.matchAll(/( +|\n+|\t+|\r+)|[^ \n\t\r]+/g)) {
    const sign = signs[part[0]];
    runs.push([sign ? (part.length > 2 ? `${sign}×${part.length}` : sign.repeat(part.length)) : shorten(part), Boolean(sign)]);
  }
  return runs.length ? runs.slice(0, MOST_RUNS) : [["∅", true]];
}

const shorten = (text) => (text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN - 1)}…` : text);

/** An SVG of the round, no larger than `width` and `height` where it can still be read at that size. */
export function drawTree(round, width, height, font) {
  const nodes = layOut(round);
  brush.font = font;
  for (const node of nodes) {
    node.runs = readable(node.text);
    const shown = node.runs.map(([text]) => text).join("");
    node.chance = node.prob === null ? "" : percent(node.prob);
    node.label = brush.measureText(shown).width;
    node.width = Math.ceil(node.label + (node.chance ? brush.measureText(node.chance).width * 0.85 + 7 : 0)) + 14;
  }
  const columns = [];
  for (const node of nodes) columns[node.depth] = Math.max(columns[node.depth] || 0, node.width);
  const place = (gap) => columns.map((_, depth) => PAD + columns.slice(0, depth).reduce((sum, w) => sum + w + gap, 0));
  const widthOf = (lefts) => lefts.at(-1) + columns.at(-1) + PAD;
  const gap = GAPS.find((gap) => widthOf(place(gap)) <= width) ?? GAPS.at(-1);
  const lefts = place(gap);
  const wide = widthOf(lefts);
  const high = (Math.max(...nodes.map((node) => node.row)) + 1) * ROW + 2 * PAD;
  for (const node of nodes) {
    node.x = lefts[node.depth];
    node.y = PAD + (node.row + 0.5) * ROW;
  }
  const scale = Math.max(LEAST_SCALE, Math.min(1, width / wide, height / high));
  const size = { viewBox: `0 0 ${wide} ${high}`, width: wide * scale, height: high * scale };
  // rejected first, so that the path lies on top
  const ordered = [...nodes].sort((a, b) => isLit(a) - isLit(b));
  const branches = ordered.filter((node) => node.parent).map((node) => branch(node, gap));
  return svg("svg", { class: "tree", "aria-hidden": "true", ...size }, branches, ordered.map(pill));
}

/** How high the tallest of these rounds is at full size, in pixels; rounds to come may be as high as the last ones. */
export function heightFor(rounds) {
  const rows = rounds.map(({ tree }) => 1 + tree.parents.length - new Set(tree.parents).size);
  return Math.max(LEAST_ROWS, ...rows) * ROW + 2 * PAD;
}

const isLit = (node) => node.role !== "rejected";
const percent = (p) => (p < 0.005 ? "<1%" : `${Math.round(100 * p)}%`);

/** Nodes with depth and row: a node's first child stands on its own row, and the accepted child is the first. */
function layOut(round) {
  const { texts, parents, probs, scores } = round.tree;
  const accepted = new Set(round.path);
  const nodes = texts.map((text, i) => {
    const role = i === 0 ? "root" : accepted.has(i) ? "accepted" : "rejected";
    return { text, role, prob: i && probs ? (probs[i] ?? null) : null, rank: probs?.[i] ?? scores?.[i] ?? 0, children: [] };
  });
  nodes.forEach((node, i) => {
    node.parent = nodes[parents[i]] || null;
    node.depth = node.parent ? node.parent.depth + 1 : 0;
    if (node.parent) node.parent.children.push(node);
  });
  // the bonus is the last committed token; a stop may have cut it off
  if (round.new.length === round.path.length) {
    const parent = nodes[round.path.at(-1)];
    const bonus = { text: round.new.at(-1).text, role: "bonus", prob: null, rank: Infinity, children: [], parent };
    bonus.depth = parent.depth + 1;
    parent.children.push(bonus);
    nodes.push(bonus);
  }
  const first = (node) => (isLit(node) ? 0 : 1);
  for (const node of nodes) node.children.sort((a, b) => first(a) - first(b) || b.rank - a.rank);
  let next = 0;
  const stack = [nodes[0]];
  while (stack.length) {
    const node = stack.pop();
    node.row = node.parent && node.parent.children[0] === node ? node.parent.row : next;
    next = Math.max(next, node.row + 1);
    stack.push(...[...node.children].reverse());
  }
  return nodes;
}

function branch(node, gap) {
  const [x1, y1, x2, y2] = [node.parent.x + node.parent.width, node.parent.y, node.x, node.y];
  const trunk = x2 - gap / 2; // siblings share it
  const bend = 5;
  const down = `H${trunk - bend}Q${trunk} ${y1} ${trunk} ${y1 + bend}V${y2 - bend}Q${trunk} ${y2} ${trunk + bend} ${y2}H${x2 + 4}`;
  const way = `M${x1} ${y1}${y1 === y2 ? `H${x2}` : down}`;
  return svg("path", { class: `branch ${node.role}`, d: way });
}

function pill(node) {
  const { x, y, width, role } = node;
  const label = svg("text", { x: x + 7, y: y + 4 });
  for (const [text, isSign] of node.runs) label.append(isSign ? svg("tspan", { class: "sign" }, text) : text);
  return svg(
    "g",
    { class: `node ${role}` },
    svg("title", {}, node.text + (node.chance ? `, drafted with ${node.chance}` : "")),
    svg("rect", { x, y: y - PILL / 2, width, height: PILL, rx: PILL / 2 - 4 }),
    label,
    node.chance && svg("text", { class: "chance", x: x + width - 7, y: y + 4, "text-anchor": "end" }, node.chance),
  );
}
