// Elements from names and text. Strings become text nodes and never HTML, so nothing that is shown can be markup.

const SVG = "http://www.w3.org/2000/svg";

/** h("button", {class: "quiet", onclick: f, "aria-label": "Copy"}, "Copy"): an element with its children. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** An icon of index.html's sheet; its meaning must be in a label beside it. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true", focusable: "false" }, svg("use", { href: `#icon-${name}` }));
}

/** Calls `draw` once before the next frame, however often it is asked for. */
export function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

/** A button that shows an icon only; the label is its name. */
export function iconButton(name, label, action) {
  return h("button", { type: "button", class: "quiet only-icon", "aria-label": label, title: label, onclick: action }, icon(name));
}

/** A small button with an icon and words. */
export function wordButton(name, words, action) {
  return h("button", { type: "button", class: "quiet small", onclick: action }, icon(name), words);
}

/** Copies when `button` is clicked what `text()` gives, and shows there for a moment whether it could. */
export function copies(button, text) {
  button.addEventListener("click", async () => {
    let outcome = ["check", "Copied"];
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      outcome = ["alert", "The browser did not allow copying"];
    }
    say(outcome[1]);
    button.querySelector(".icon").replaceWith(icon(outcome[0]));
    setTimeout(() => button.querySelector(".icon").replaceWith(icon("copy")), 1500);
  });
  return button;
}

/** Tells a screen reader, politely. */
export function say(text) {
  byId("said").textContent = text;
}
