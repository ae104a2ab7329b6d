// Markdown to DOM nodes. The text comes from a model and is never trusted: no HTML is made from a string, every
// character ends in a text node, and the only attribute that it reaches is a link's address, after a check.
//
// Nodes keep where in the source they stand, so that text can be tinted by the round that wrote it. The parser looks at
// each character a bounded number of times: nesting is cut at fixed depths.

import { copies, h, iconButton } from "./dom.js";

const MOST_BLOCKS_DEEP = 8;
const MOST_MARKS_DEEP = 16;
const MOST_ADDRESS = 2000;
const ESCAPED = /[!"#$%&'*+,\-./:;<=>?@\\^_`{|}~]/; // not brackets: \( and \[ begin formulas, which stay readable
const SPACE = /\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;

// -- blocks -----------------------------------------------------------------------------------------------------------

/** Blocks {kind, start, end, ...}. isOpen: more text will come, so that marks left open at the end count as closed. */
export function parse(source, isOpen = false) {
  const lines = [];
  let at = 0;
  for (const text of source.split("\n")) {
    lines.push({ text: text.endsWith("\r") ? text.slice(0, -1) : text, at });
    at += text.length + 1;
  }
  return blocks(lines, 0, isOpen ? source.trimEnd().length : -1);
}

function blocks(lines, depth, openEnd) {
  const found = [];
  let i = 0;
  while (i < lines.length) {
    if (!lines[i].text.trim()) {
      i++;
      continue;
    }
    const nested = depth < MOST_BLOCKS_DEEP;
    const [block, next] =
      fence(lines, i) ||
      heading(lines, i, openEnd) ||
      rule(lines, i) ||
      (nested && (quote(lines, i, depth, openEnd) || list(lines, i, depth, openEnd))) ||
      table(lines, i, openEnd) ||
      paragraph(lines, i, nested, openEnd);
    const last = lines[next - 1];
    found.push({ ...block, start: lines[i].at, end: last.at + last.text.length });
    i = next;
  }
  return found;
}

const dropped = (line, n) => ({ text: line.text.slice(n), at: line.at + n });
const indentOf = (text) => text.length - text.trimStart().length;

const FENCE = /^ {0,12}(`{3,}|~{3,})([^`]*)$/;

function fence(lines, i) {
  const opened = FENCE.exec(lines[i].text);
  if (!opened) return null;
  const indent = indentOf(lines[i].text);
  const inside = [];
  for (i++; i < lines.length; i++) {
    const text = lines[i].text.trim();
    if (text.startsWith(opened[1]) && text === opened[1][0].repeat(text.length)) {
      i++;
      break;
    }
    inside.push(dropped(lines[i], Math.min(indent, indentOf(lines[i].text))));
  }
  return [{ kind: "code", language: /^[\w+#.-]{0,24}/.exec(opened[2].trim())[0], lines: inside }, i];
}

function heading(lines, i, openEnd) {
  const found = /^ {0,3}(#{1,6}) +/.exec(lines[i].text);
  if (!found) return null;
  return [{ kind: "heading", level: found[1].length, inline: inline([dropped(lines[i], found[0].length)], openEnd) }, i + 1];
}

function isRule(text) {
  const marks = text.replace(/[ \t]/g, "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

const rule = (lines, i) => (isRule(lines[i].text) ? [{ kind: "rule" }, i + 1] : null);

const QUOTE = /^ {0,3}> ?/;

function quote(lines, i, depth, openEnd) {
  const inside = [];
  for (let found; i < lines.length && (found = QUOTE.exec(lines[i].text)); i++) {
    inside.push(dropped(lines[i], found[0].length));
  }
  return inside.length ? [{ kind: "quote", blocks: blocks(inside, depth + 1, openEnd) }, i] : null;
}

function marker(text) {
  const found = /^( *)([-*+]|\d{1,9}[.)])( +|$)/.exec(text);
  if (!found || isRule(text)) return null;
  const [, indent, mark, gap] = found;
  const isNumber = mark.length > 1;
  const width = indent.length + mark.length + (gap.length > 4 ? 1 : gap.length);
  return { indent: indent.length, kind: isNumber ? mark.at(-1) : mark, number: isNumber ? parseInt(mark, 10) : null, width };
}

function list(lines, i, depth, openEnd) {
  const first = marker(lines[i].text);
  if (!first || first.indent > 3) return null;
  const continues = (text) => indentOf(text) >= first.indent + 2;
  const items = [];
  for (let mark; i < lines.length; ) {
    mark = marker(lines[i].text);
    if (!mark || mark.kind !== first.kind || mark.indent > first.indent + 1) break;
    const inside = [dropped(lines[i], mark.width)];
    for (i++; i < lines.length; i++) {
      const { text } = lines[i];
      if (!text.trim()) {
        let after = i;
        while (after < lines.length && !lines[after].text.trim()) after++;
        if (after === lines.length || !continues(lines[after].text)) {
          const another = after < lines.length && marker(lines[after].text);
          if (another && another.kind === first.kind) i = after; // the list goes on behind the gap
          break;
        }
        inside.push(lines[i]);
      } else if (continues(text)) {
        inside.push(dropped(lines[i], Math.min(indentOf(text), mark.width)));
      } else if (marker(text) || beginsBlock(text, true)) {
        break;
      } else {
        inside.push(lines[i]); // a lazy line of the item's paragraph
      }
    }
    items.push(blocks(inside, depth + 1, openEnd));
  }
  return [{ kind: "list", number: first.number, items }, i];
}

function cells(line) {
  let { text } = line;
  let at = line.at + indentOf(text);
  text = text.trim();
  if (text.startsWith("|")) {
    text = text.slice(1);
    at++;
  }
  if (text.endsWith("|") && !text.endsWith("\\|")) text = text.slice(0, -1);
  const found = [];
  for (const part of text.split("|")) {
    found.push({ text: part.trim(), at: at + indentOf(part) });
    at += part.length + 1;
  }
  return found;
}

function table(lines, i, openEnd) {
  if (!lines[i].text.includes("|") || !lines[i + 1]?.text.includes("-")) return null;
  const head = cells(lines[i]);
  const below = cells(lines[i + 1]).map((cell) => cell.text);
  if (below.length !== head.length || !below.every((text) => /^:?-+:?$/.test(text))) return null;
  const aligns = below.map((text) => (text.endsWith(":") ? (text.startsWith(":") ? "center" : "end") : "start"));
  const rows = [head];
  for (i += 2; i < lines.length && lines[i].text.trim() && lines[i].text.includes("|"); i++) rows.push(cells(lines[i]));
  const inlines = rows.map((row) => row.map((cell) => inline([cell], openEnd)));
  return [{ kind: "table", aligns, rows: inlines }, i];
}

function beginsBlock(text, nested) {
  if (FENCE.test(text) || /^ {0,3}#{1,6} /.test(text) || isRule(text)) return true;
  if (!nested) return false;
  const mark = marker(text);
  return QUOTE.test(text) || (mark !== null && mark.indent <= 3 && (mark.number ?? 1) === 1);
}

function paragraph(lines, i, nested, openEnd) {
  const inside = [lines[i++]];
  while (i < lines.length && lines[i].text.trim() && !beginsBlock(lines[i].text, nested)) inside.push(lines[i++]);
  return [{ kind: "paragraph", inline: inline(inside.map((line) => dropped(line, indentOf(line.text))), openEnd) }, i];
}

// -- inside a line ----------------------------------------------------------------------------------------------------

/** Nodes {kind: "text", start, end}, {kind: "break"}, and "code", "strong", "em", "del", "link" with children. */
function inline(lines, openEnd) {
  const text = lines.map((line) => line.text.trimEnd()).join("\n");
  const at = []; // at[i]: where text[i] stands in the source
  for (const line of lines) {
    const length = line.text.trimEnd().length;
    for (let k = 0; k <= length; k++) at.push(line.at + k);
  }
  const stack = [{ children: [] }]; // what is open: {mark, size, from, to, children}
  const ticks = tickRuns(text);
  const lastParenthesis = text.lastIndexOf(")");

  const add = (node) => stack.at(-1).children.push(node);
  const addText = (from, to) => {
    if (from === to) return;
    const last = stack.at(-1).children.at(-1);
    if (last?.kind === "text" && last.end === at[from]) last.end = at[to - 1] + 1;
    else add({ kind: "text", start: at[from], end: at[to - 1] + 1 });
  };
  const open = (mark, size, from, to) => {
    if (stack.length > MOST_MARKS_DEEP) addText(from, to);
    else stack.push({ mark, size, from, to, children: [] });
  };
  const dissolve = () => {
    const { from, to, children } = stack.pop();
    addText(from, to);
    for (const child of children) add(child);
  };
  /** Closes the innermost open mark that `fits`, not looking beyond a bracket. */
  const close = (fits) => {
    for (let k = stack.length - 1; k > 0; k--) {
      if (fits(stack[k])) {
        while (stack.length - 1 > k) dissolve();
        return stack.pop();
      }
      if (stack[k].mark === "[") return null;
    }
    return null;
  };
  const wrap = ({ mark, size, children }) =>
    children.length && add({ kind: mark === "~" ? "del" : size === 2 ? "strong" : "em", children });

  let i = 0;
  while (i < text.length) {
    const c = text[i];
    if (c === "\n") {
      add({ kind: "break" });
      i++;
    } else if (c === "\\" && i + 1 < text.length && ESCAPED.test(text[i + 1])) {
      addText(i + 1, i + 2);
      i += 2;
    } else if (c === "`") {
      const size = runLength(text, i);
      const end = ticks(size, i + size);
      if (end < 0) addText(i, i + size);
      else add({ kind: "code", children: codeSpan(text, at, i + size, end) });
      i = end < 0 ? i + size : end + size;
    } else if (c === "*" || c === "_" || (c === "~" && text[i + 1] === "~")) {
      i = marks(c, i);
    } else if (c === "[" || (c === "!" && text[i + 1] === "[")) {
      const size = c === "[" ? 1 : 2;
      open("[", size, i, i + size);
      i += size;
    } else if (c === "]") {
      i = bracketEnd(i);
    } else if (c === "<" || (c === "h" && !/\w/.test(text[i - 1] || " "))) {
      i = bareAddress(i);
    } else {
      let to = i + 1;
      while (to < text.length && !"\n\\`*_~[!]<h".includes(text[to])) to++;
      addText(i, to);
      i = to;
    }
  }
  const isOpen = openEnd >= 0 && at.length > 0 && at.at(-1) >= openEnd;
  while (stack.length > 1) {
    if (isOpen && stack.at(-1).mark !== "[" && stack.length > 1) wrap(stack.pop());
    else dissolve();
  }
  return stack[0].children;

  function marks(c, from) {
    let rest = runLength(text, from);
    let pos = from;
    const before = text[from - 1] ?? " ";
    const after = text[from + rest] ?? " ";
    const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const opens = left && (c !== "_" || !right || PUNCTUATION.test(before));
    const closes = right && (c !== "_" || !left || PUNCTUATION.test(after));
    if (closes && rest === 2) turnTriple(c);
    while (closes && rest) {
      const frame = close((f) => f.mark === c && f.size <= rest);
      if (!frame) break;
      wrap(frame);
      rest -= frame.size;
      pos += frame.size;
    }
    while (opens && rest && stack.length <= MOST_MARKS_DEEP) {
      const size = rest >= 2 ? 2 : 1;
      if (c === "~" && size === 1) break;
      open(c, size, pos, pos + size);
      rest -= size;
      pos += size;
    }
    addText(pos, pos + rest);
    return pos + rest;
  }

  /** Three marks open strong, then em inside it. Where two close first, they were em, then strong inside it. */
  function turnTriple(c) {
    const [outer, inner] = stack.slice(-2);
    const isTriple = inner?.mark === c && inner.size === 1 && outer.mark === c && outer.size === 2;
    if (!isTriple || outer.to !== inner.from || outer.children.length) return;
    [outer.size, inner.size] = [1, 2];
    outer.to = inner.from = outer.from + 1;
  }

  function bracketEnd(from) {
    const target = text[from + 1] === "(" && lastParenthesis > from ? destination(text, from + 2) : null;
    const frame = target && close((f) => f.mark === "[");
    if (!frame) {
      addText(from, from + 1);
      return from + 1;
    }
    const address = safeAddress(target.address);
    if (address && (frame.children.length || frame.size === 2)) {
      const isImage = frame.size === 2; // never fetched: an address can carry what was said to whoever owns it
      add({ kind: "link", address, isImage, children: frame.children.flatMap((n) => (n.kind === "link" ? n.children : [n])) });
    } else {
      addText(frame.from, frame.to);
      for (const child of frame.children) add(child);
      addText(from, target.end);
    }
    return target.end;
  }

  function bareAddress(from) {
    const start = text[from] === "<" ? from + 1 : from;
    if (!text.startsWith("http://", start) && !text.startsWith("https://", start)) {
      addText(from, from + 1);
      return from + 1;
    }
    let end = start;
    while (end < text.length && !/[\s<>"`]/.test(text[end])) end++;
    const isClosed = start > from && text[end] === ">";
    if (!isClosed) while (".,;:!?)'*_]~".includes(text[end - 1])) end--;
    const address = safeAddress(text.slice(start, end));
    if (!isClosed) addText(from, start);
    if (address) add({ kind: "link", address, children: [{ kind: "text", start: at[start], end: at[end - 1] + 1 }] });
    else addText(start, end);
    return isClosed ? end + 1 : end;
  }
}

function runLength(text, i) {
  let n = 1;
  while (text[i + n] === text[i]) n++;
  return n;
}

/** A function (size, from): where the next run of exactly so many backticks begins, or -1. */
function tickRuns(text) {
  const bySize = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!bySize.has(run.length)) bySize.set(run.length, []);
    bySize.get(run.length).push(index);
  }
  return (size, from) => {
    const places = bySize.get(size) || [];
    while (places.length && places[0] < from) places.shift();
    return places.length ? places[0] : -1;
  };
}

function codeSpan(text, at, from, to) {
  if (text[from] === " " && text[to - 1] === " " && text.slice(from, to).trim()) [from, to] = [from + 1, to - 1];
  const children = [];
  for (let i = from; i < to; ) {
    const line = text.indexOf("\n", i);
    const end = line < 0 || line > to ? to : line;
    if (end > i) children.push({ kind: "text", start: at[i], end: at[end - 1] + 1 });
    if (end < to) children.push({ kind: "space" });
    i = end + 1;
  }
  return children;
}

/** The address between parentheses, and where it ends; a title behind it is dropped. */
function destination(text, from) {
  let depth = 0;
  for (let i = from; i < text.length && i - from < MOST_ADDRESS; i++) {
    if (text[i] === "\n") return null;
    if (text[i] === "(") depth++;
    if (text[i] === ")" && depth-- === 0) return { address: text.slice(from, i).trim().split(/\s/)[0], end: i + 1 };
  }
  return null;
}

/** The address where it leads to a web page or a mailbox; null for everything else, scripts above all. */
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

// -- nodes of the page --------------------------------------------------------------------------------------------------

/** One block as an element. leaf(parent, start, end): appends that piece of the source as text. */
export function draw(block, leaf) {
  switch (block.kind) {
    case "heading":
      return drawInline(h(`h${Math.min(block.level + 2, 6)}`), block.inline, leaf);
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, block.blocks.map((inner) => draw(inner, leaf)));
    case "list": {
      const isOrdered = block.number !== null;
      const items = block.items.map((item) => h("li", {}, item.map((inner) => draw(inner, leaf))));
      return h(isOrdered ? "ol" : "ul", { start: isOrdered && block.number !== 1 ? block.number : null }, items);
    }
    case "code":
      return drawCode(block, leaf);
    case "table": {
      const row = (tag, cells) =>
        h("tr", {}, cells.map((cell, k) => drawInline(h(tag, { class: `to-${block.aligns[k] ?? "start"}` }), cell, leaf)));
      const [head, ...rest] = block.rows;
      const whole = h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, rest.map((cells) => row("td", cells))));
      return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, whole);
    }
    default:
      return drawInline(h("p", { dir: "auto" }), block.inline, leaf);
  }
}

function drawCode(block, leaf) {
  const code = h("code");
  block.lines.forEach((line, k) => {
    if (k) code.append("\n");
    const indent = indentOf(line.text);
    code.append(line.text.slice(0, indent)); // untinted: blocks of colour in front of each line say nothing
    if (indent < line.text.length) leaf(code, line.at + indent, line.at + line.text.length);
  });
  const text = block.lines.map((line) => line.text).join("\n");
  const label = block.language || "Code";
  const pre = h("pre", { tabindex: "0", role: "region", "aria-label": `Code: ${label}`, dir: "ltr" }, code);
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, label), copies(iconButton("copy", "Copy the code"), () => text)), pre);
}

function drawInline(parent, nodes, leaf) {
  for (const node of nodes) {
    if (node.kind === "text") leaf(parent, node.start, node.end);
    else if (node.kind === "break") parent.append(h("br"));
    else if (node.kind === "space") parent.append(" ");
    else if (node.kind === "link") {
      const link = h("a", { href: node.address, rel: "noopener noreferrer nofollow", target: "_blank", title: node.address });
      if (node.isImage) link.append(node.children.length ? "Image: " : "Image");
      parent.append(drawInline(link, node.children, leaf));
    } else parent.append(drawInline(h(node.kind), node.children, leaf));
  }
  return parent;
}
