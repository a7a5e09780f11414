// Elements of HTML and SVG. Text goes in as text: nothing that a run is called can become markup.

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null)); // strings become text
  return node;
}

const byId = (id) => document.getElementById(id);

// Runs differ in colour; beyond the colours, lines are dashed.
const COLOURS = 6;
const DASHES = [null, [7, 3], [2, 3], [9, 3, 2, 3]];

const colourOf = (index) => `run-${index % COLOURS}`;
const dashOf = (index) => DASHES[Math.floor(index / COLOURS) % DASHES.length];

function swatch(index) {
  return svg("svg", { class: `swatch ${colourOf(index)}`, width: 26, height: 14, "aria-hidden": "true" },
    svg("path", { class: "line", d: "M2 7h22", "stroke-dasharray": dashOf(index)?.join(" ") }));
}
