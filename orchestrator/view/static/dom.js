// Elements. What a run wrote comes into the page as text nodes and attribute values, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** element("td", { class: "number", onclick: f }, "text", child): functions are listeners, all else attributes. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Pixels that a drawing may be wide inside of a card. */
export function drawingWidth() {
  return Math.max(document.getElementById("view").clientWidth - 70, 480);
}

/** Words beside a spot of a colour; null: of none. */
export function swatch(colour, words) {
  const spot = element("span", { class: "swatch" });
  spot.style.background = colour ?? "transparent";
  return element("span", {}, spot, words);
}

/** A chart of uPlot in a card's colours, as wide as its holder stays. `axes`: what the axes of x and y have of their own. */
export function plotted(holder, height, axes, options, data) {
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--soft"), grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { stroke: style.getPropertyValue("--line") }, font: "11px system-ui, DejaVu Sans, sans-serif" };
  const both = axes.map((own) => ({ ...axis, ...own, grid: { ...axis.grid, ...own.grid }, ticks: { ...axis.ticks, ...own.ticks } }));
  const plot = new uPlot({ width: Math.max(holder.clientWidth, 300), height, axes: both, ...options }, data, holder);
  new ResizeObserver(() => {
    if (holder.clientWidth > 0 && holder.clientWidth !== plot.width) plot.setSize({ width: holder.clientWidth, height });
  }).observe(holder);
  return plot;
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children);
}

/** Shows text beside the pointer while it is over `target`. */
export function tip(target, text) {
  const box = document.getElementById("tip");
  target.addEventListener("pointermove", (event) => {
    box.textContent = typeof text === "function" ? text() : text;
    box.hidden = false;
    const left = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 8);
    const below = event.clientY + 18 + box.offsetHeight < window.innerHeight;
    box.style.left = `${Math.max(left, 4)}px`;
    box.style.top = `${below ? event.clientY + 18 : event.clientY - box.offsetHeight - 10}px`;
  });
  target.addEventListener("pointerleave", () => { box.hidden = true; });
  return target;
}

export function choice(label, options, value, onchange) {
  const select = element("select", { "aria-label": label, onchange: () => onchange(select.value) });
  for (const [key, text] of options) select.append(element("option", { value: key }, text));
  select.value = value;
  return element("label", {}, label, select);
}

export function tick(label, value, onchange) {
  const box = element("input", { type: "checkbox", "aria-label": label, onchange: () => onchange(box.checked) });
  box.checked = value;
  return element("label", {}, box, label);
}

export function numberBox(label, value, onchange) {
  const box = element("input", { type: "number", min: "0", "aria-label": label, onchange: () => onchange(box.value) });
  box.value = value;
  return element("label", {}, label, box);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
