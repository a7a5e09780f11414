// A frame with axes, in which something is drawn, and a crosshair that reads values off it by pointer or arrow keys.

const MARGIN = { top: 10, right: 14, bottom: 44 };

class Chart {
  // `describe(width)` says what to draw now, or returns a sentence if there is nothing.
  constructor(describe) {
    this.describe = describe;
    this.at = null;
    this.svg = svg("svg", { tabindex: 0, role: "group" });
    this.plot = element("div", { class: "plot" }, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    // A finger that was lifted has left, but its values stay until another place is touched, or the page is scrolled.
    this.svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.leave(); });
    document.addEventListener("pointerdown", (event) => { if (!this.svg.contains(event.target)) this.leave(); });
    document.addEventListener("scroll", () => { if (this.touched) this.leave(); }, { passive: true });
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  render() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.leave();
    const view = (this.view = this.describe(width));
    if (typeof view === "string") {
      this.svg.setAttribute("height", 0);
      this.svg.replaceChildren();
      if (!this.empty) this.plot.append((this.empty = element("p", { class: "empty" })));
      this.empty.textContent = view;
      return;
    }
    this.empty?.remove();
    this.empty = null;
    this.layOut(view, width);
    for (const [name, value] of Object.entries({ width, height: view.height, "aria-label": view.label })) {
      this.svg.setAttribute(name, value);
    }
    const axes = svg("g", { class: "axes" });
    this.cross = svg("g", { class: "cross" });
    const curves = svg("g", {});
    this.drawAxes(axes, view, width);
    view.draw(curves, this.x, this.y);
    this.svg.replaceChildren(axes, curves, this.cross);
  }

  layOut(view, width) {
    const bottom = view.height - MARGIN.bottom;
    const count = Math.max(2, Math.round((bottom - MARGIN.top) / 48));
    this.y = makeScale({ ...view.y, from: bottom, to: MARGIN.top, count });
    const longest = Math.max(...this.y.ticks.map(([, text]) => text.length));
    this.left = Math.max(28, 10 + 7 * longest);
    this.right = width - MARGIN.right;
    this.bottom = bottom;
    for (let many = 10; many > 0; many--) { // as many labels as do not touch
      this.x = makeScale({ ...view.x, from: this.left, to: this.right, count: many });
      const places = this.x.ticks.map(([value, text]) => [this.x.pixel(value), 3.7 * text.length + 8]);
      if (places.every(([at, half], n) => n === 0 || at - half >= places[n - 1][0] + places[n - 1][1])) break;
    }
  }

  drawAxes(group, view, width) {
    for (const [value, text] of this.y.ticks) {
      const y = Math.round(this.y.pixel(value)) + 0.5;
      group.append(svg("line", { class: "grid", x1: this.left, x2: this.right, y1: y, y2: y }));
      group.append(svg("text", { x: this.left - 8, y: y + 4, "text-anchor": "end" }, text));
    }
    const base = Math.round(this.bottom) + 0.5;
    group.append(svg("line", { class: "base", x1: this.left, x2: this.right, y1: base, y2: base }));
    for (const [value, text] of this.x.ticks) {
      const x = Math.round(this.x.pixel(value)) + 0.5;
      const half = 3.6 * text.length; // a label at the very edge is moved inwards, not cut
      group.append(svg("line", { class: "base", x1: x, x2: x, y1: base, y2: base + 4 }));
      group.append(svg("text", { x: Math.min(x, width - half), y: base + 18, "text-anchor": "middle" }, text));
    }
    group.append(svg("text", { class: "title", x: this.right, y: base + 36, "text-anchor": "end" }, view.x.title));
  }

  point(event) {
    if (!this.view?.places?.length) return;
    const box = this.svg.getBoundingClientRect();
    const at = nearest(this.view.places, this.x.valueAt(event.clientX - box.left), this.x);
    this.show(at, event.clientX, event.clientY, event.pointerType === "touch");
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.leave();
    if (move === undefined || !this.view?.places?.length) return;
    event.preventDefault();
    const last = this.view.places.length - 1;
    const from = this.at ?? (move > 0 ? -1 : last + 1);
    const at = Math.max(0, Math.min(last, from + move));
    const box = this.svg.getBoundingClientRect();
    this.show(at, box.left + this.x.pixel(this.view.places[at]), box.top + MARGIN.top);
  }

  show(at, clientX, clientY, touched = false) {
    this.at = at;
    this.touched = touched;
    const place = this.view.places[at];
    const { heading, columns, rows, points } = this.view.read(place);
    const x = Math.round(this.x.pixel(place)) + 0.5;
    this.cross.replaceChildren(svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: this.bottom }),
      ...points.map(([index, px, py]) => svg("path", {
        class: `mark ${colourOf(index)}`, d: markOf(index, this.x.pixel(px), this.y.pixel(py), 4.5),
      })));
    fillTooltip(heading, columns, rows);
    placeTooltip(clientX, clientY, touched);
  }

  leave() {
    if (this.at === null) return;
    this.at = null;
    this.cross?.replaceChildren();
    byId("tooltip").hidden = true;
  }
}

// Of sorted places, the one that is closest on the screen.
function nearest(places, value, scale) {
  let [low, high] = [0, places.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < value) low = middle;
    else high = middle;
  }
  const distance = (at) => Math.abs(scale.pixel(places[at]) - scale.pixel(value));
  return distance(low) <= distance(high) ? low : high;
}

// Rows: { key: an element in front, name, cells }.
function fillTooltip(heading, columns, rows) {
  const head = columns.length
    ? [element("tr", {}, element("td", {}), ...columns.map((name) => element("th", { scope: "col" }, name)))] : [];
  byId("tooltip").replaceChildren(element("p", { class: "place" }, heading),
    element("table", {}, ...head, ...rows.map(({ key, name, cells }) => element("tr", {},
      element("th", { scope: "row" }, key, element("span", {}, name)), ...cells.map((cell) => element("td", {}, cell))))));
}

// Beside the pointer, or above the finger, which hides what is below it; always inside of the window.
function placeTooltip(x, y, touched) {
  const tooltip = byId("tooltip");
  tooltip.hidden = false;
  tooltip.style.left = tooltip.style.top = "0"; // else its width would depend on where it was
  const { width, height } = tooltip.getBoundingClientRect();
  const [right, bottom] = [document.documentElement.clientWidth, window.innerHeight];
  const beside = x + 18 + width <= right - 8 ? x + 18 : x - 18 - width;
  const [left, top] = touched && y - height - 32 >= 8 ? [x - width / 2, y - height - 32] : [beside, y + 14];
  tooltip.style.left = `${Math.max(8, Math.min(left, right - width - 8))}px`;
  tooltip.style.top = `${Math.max(8, Math.min(top, bottom - height - 8))}px`;
}
