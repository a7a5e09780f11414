// Charts by uPlot: lines of runs, and stacked areas of the parts of a step. A tooltip reads values by pointer or arrow keys.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

class Chart {
  // `describe()` returns what to draw now, or a sentence if there is nothing.
  constructor(describe) {
    this.describe = describe;
    this.at = null;
    this.plot = element("div", { class: "plot", tabindex: 0, role: "group" });
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.leave());
    document.addEventListener("scroll", () => this.leave(), { passive: true });
  }

  render() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.leave();
    this.uplot?.destroy();
    this.uplot = null;
    this.width = width;
    const view = (this.view = this.describe());
    this.plot.replaceChildren();
    if (typeof view === "string") {
      this.plot.append(element("p", { class: "empty" }, view));
      return;
    }
    this.plot.setAttribute("aria-label", view.label);
    this.uplot = new uPlot(this.options(view, width), view.data, this.plot);
  }

  options(view, width) {
    const axis = (more) => ({ stroke: colour("muted"), font: "12px system-ui, sans-serif", ...more });
    const texts = (format) => (_, splits) => splits.map((value) => (value === null ? "" : format(value)));
    // Without it, uPlot would begin at the lowest value, which need not be round.
    const round = (log) => (log ? { splits: (_, axis, min, max) => logSplits(min, max), filter: (_, splits) => splits } : {});
    const room = (_, values) => 16 + 7 * Math.max(2, ...(values ?? []).map((text) => text.length));
    return {
      width, height: view.height, legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: {
        x: { time: false, distr: view.x.log ? 3 : 1, range: [view.x.low, view.x.high] },
        y: { distr: view.y.log ? 3 : 1, range: [view.y.low, view.y.high] },
      },
      series: [{}, ...view.series],
      axes: [
        axis({ label: view.x.title, labelFont: "12px system-ui, sans-serif", labelSize: 16, size: 34, gap: 2, space: 70,
          ...round(view.x.log), values: texts(view.x.tick), grid: { show: false }, ticks: { stroke: colour("line") } }),
        axis({ ...round(view.y.log), values: texts(view.y.tick), size: room, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } }),
      ],
      hooks: { setCursor: [(u) => this.read(u)], ready: [(u) => this.annotate(u, view)] },
    };
  }

  // Texts over the plot: where runs stopped or went on, and what each bump is. A text that would cover another is left out.
  annotate(u, { marks = [], bumps = [] }) {
    const taken = [];
    const put = (node, x, y) => {
      node.style.left = node.style.top = "0";
      u.over.append(node);
      const [width, height] = [node.offsetWidth, node.offsetHeight];
      const left = Math.max(0, Math.min(x, u.over.clientWidth - width));
      const top = Math.max(0, y - height);
      const covers = taken.some((box) => left < box.right + 4 && left + width + 4 > box.left && top < box.bottom && top + height > box.top);
      if (covers) node.remove();
      else taken.push({ left, right: left + width, top, bottom: top + height });
      [node.style.left, node.style.top] = [`${left}px`, `${top}px`];
      return !covers;
    };
    for (const { x, y, text } of bumps) {
      put(element("span", { class: "note bump" }, text), u.valToPos(x, "x") + 3, u.valToPos(y, "y") - 1);
    }
    for (const { index, x, text } of marks) {
      const line = element("i", { class: `stop ${colourOf(index)}`, title: text });
      line.style.left = `${u.valToPos(x, "x")}px`;
      u.over.append(line);
      const node = element("span", { class: `note ${colourOf(index)}` }, text);
      [0.4, 0.25, 0.55, 0.7, 0.1, 0.9].some((height) => put(node, u.valToPos(x, "x") + 5, height * u.over.clientHeight));
    }
  }

  read(u) {
    const { idx, left } = u.cursor;
    if (idx === null || idx === undefined || left < 0) {
      this.at = null;
      byId("tooltip").hidden = true;
      return;
    }
    const places = u.data[0];
    this.at = idx;
    const box = u.over.getBoundingClientRect();
    const { heading, columns, rows } = this.view.read(places[idx], (value) => u.valToPos(value, "x"));
    fillTooltip(heading, columns, rows);
    placeTooltip(box.left + left, box.top + Math.max(0, u.cursor.top));
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.leave();
    if (move === undefined || !this.uplot) return;
    event.preventDefault();
    const places = this.uplot.data[0];
    const from = this.at ?? (move > 0 ? -1 : places.length);
    const place = places[Math.max(0, Math.min(places.length - 1, from + move))];
    this.uplot.setCursor({ left: this.uplot.valToPos(place, "x"), top: 0 });
  }

  leave() {
    if (this.at !== null) this.uplot?.setCursor({ left: -10, top: -10 });
  }
}

// Rows: { key: an element in front, name, cells }.
function fillTooltip(heading, columns, rows) {
  const head = columns.length
    ? [element("tr", {}, element("td", {}), ...columns.map((name) => element("th", { scope: "col" }, name)))] : [];
  byId("tooltip").replaceChildren(element("p", { class: "place" }, heading),
    element("table", {}, ...head, ...rows.map(({ key, name, cells }) => element("tr", {},
      element("th", { scope: "row" }, key, element("span", {}, name)), ...cells.map((cell) => element("td", {}, cell))))));
}

// Beside the pointer, always inside of the window.
function placeTooltip(x, y) {
  const tooltip = byId("tooltip");
  tooltip.hidden = false;
  tooltip.style.left = tooltip.style.top = "0"; // else its width would depend on where it was
  const { width, height } = tooltip.getBoundingClientRect();
  const [right, bottom] = [document.documentElement.clientWidth, window.innerHeight];
  const left = x + 18 + width <= right - 8 ? x + 18 : x - 18 - width;
  tooltip.style.left = `${Math.max(8, Math.min(left, right - width - 8))}px`;
  tooltip.style.top = `${Math.max(8, Math.min(y + 14, bottom - height - 8))}px`;
}

// Every chart is drawn against the same axis, which the page switches.
const AXES = {
  step: { title: "steps", tick: (v) => grouped(v, 0), text: (v) => `step ${grouped(v, 0)}` },
  bytes: { title: "bytes sent per rank", tick: shortBytes, text: formatBytes },
  seconds: { title: "wall-clock time", tick: formatDuration, text: formatDuration },
};

// The axis for these curves. Bytes become logarithmic where runs differ so much that one would be a vertical line.
function axisFor(name, curves) {
  const ends = curves.map((curve) => last(curve[name])).filter((end) => end !== null);
  const high = highest([0, ...ends]);
  const log = name === "bytes" && lowest(ends) > 0 && high / lowest(ends) > 20;
  const starts = curves.flatMap((curve) => curve[name]).filter((value) => value > 0);
  const { title, tick, text } = AXES[name];
  return { low: log ? lowest(starts) : 0, high: high || 1, log, tick, text, title: title + (log ? ", logarithmic" : "") };
}

// Without Math.min(...values): tens of thousands of arguments overflow the stack.
const lowest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const highest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function last(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null) return values[at];
  return null;
}

// The points of a curve that can be drawn: [x, y] with each x once, and y null where a line must break.
function pointsOf(curve, axis, name, logY, values = curve.value) {
  const points = new Map();
  curve[name].forEach((x, at) => {
    if (x === null || (axis.log && x <= 0)) return;
    const y = values[at];
    points.set(x, y === null || (logY && y <= 0) ? null : y);
  });
  return [...points].sort((a, b) => a[0] - b[0]);
}

// The point to read at this place; null where the run has not begun or is over.
function nearestPoint(points, place, pixel) {
  const distance = (at) => Math.abs(pixel(points[at][0]) - pixel(place));
  const inside = points.length && place >= points[0][0] && place <= points[points.length - 1][0];
  const at = points.reduce((best, _, n) => (best === null || distance(n) < distance(best) ? n : best), null);
  return at !== null && (inside || distance(at) < 8) ? at : null; // a little beyond a run's ends is still at its ends
}

// The mean over `reach` steps on either side, over fewer near the ends, so that the first and last points stay.
function smoothed(curve, reach) {
  const values = curve.mean ?? curve.value;
  if (!reach) return values;
  const { step } = curve;
  const sums = [0];
  const counts = [0];
  values.forEach((value, at) => {
    sums.push(sums[at] + (value ?? 0));
    counts.push(counts[at] + (value === null ? 0 : 1));
  });
  let [from, to] = [0, 0];
  return values.map((value, at) => {
    const radius = Math.min(reach, step[at] - step[0], step[step.length - 1] - step[at]);
    while (from > 0 && step[from - 1] >= step[at] - radius) from--;
    while (step[from] < step[at] - radius) from++;
    while (to > at + 1 && step[to - 1] > step[at] + radius) to--;
    while (to < step.length && step[to] <= step[at] + radius) to++;
    const count = counts[to] - counts[from];
    return value === null || !count ? null : (sums[to] - sums[from]) / count;
  });
}

// The layers of a run's curve: a line, and faintly behind it what was measured, where the line is a mean of that.
function withMeasured(layer, values) {
  if (values === layer.curve.value) return [layer];
  return [{ ...layer, kind: "faint", column: "measured" }, { ...layer, values, column: `${layer.column}, mean` }];
}

// The places of an axis at which runs stopped or went on; what happened at the same place is one text.
function marksOf(runs, axisName) {
  const marks = new Map();
  for (const { run, index } of runs) {
    for (const mark of run.marks) {
      const x = mark[axisName];
      if (x === null) continue;
      const key = `${index} ${x}`;
      marks.set(key, { index, x, text: marks.has(key) ? `${marks.get(key).text}, ${mark.text}` : mark.text });
    }
  }
  return [...marks.values()];
}

// The points of a run at which more was sent than usual, and why, the highest first.
function bumpsOf({ traffic, events }, axisName) {
  const why = new Map(events);
  const usual = traffic.value.filter((value, at) => value !== null && !why.has(traffic.step[at])).sort((a, b) => a - b);
  const floor = 1.2 * (usual[Math.floor(usual.length / 2)] ?? 0);
  return traffic.value.map((y, at) => ({ x: traffic[axisName][at], y, text: why.get(traffic.step[at]) }))
    .filter(({ x, y, text }) => text && x !== null && y > floor).sort((a, b) => b.y - a.y);
}

function seriesOf({ index, name, kind, column, points }) {
  const marks = (kind === "marks" && points.length <= 60) || points.filter((point) => point[1] !== null).length === 1;
  return {
    label: `${name} ${column}`.trim(), stroke: colour(kind === "reference" ? "muted" : colourOf(index)),
    dash: kind === "reference" ? [6, 4] : dashOf(index), width: kind === "line" ? 1.75 : 1.25,
    alpha: kind === "faint" ? 0.25 : 1, points: { show: marks, size: 7, fill: colour("card") },
  };
}

// What a chart of lines draws. `layers`: [{ index, name, curve, values, kind, column }]. The kind is "line", "faint",
// "marks" or "reference"; the column, that of the tooltip, in which there is one row for each run. `why(step)` is a text.
function lineView({ layers, axisName, y, height, label, format, marks = [], bumps = [], why = () => "" }) {
  const axis = axisFor(axisName, layers.map((layer) => layer.curve));
  const drawn = layers.map((layer) => ({ ...layer, points: pointsOf(layer.curve, axis, axisName, y.log, layer.values) }));
  const values = drawn.flatMap((layer) => layer.points.map((point) => point[1])).filter((value) => value !== null);
  if (!values.length) return "Nothing to draw.";
  const [bottom, top] = rangeOf(y.zero && !y.log ? Math.min(0, lowest(values)) : lowest(values), highest(values), y.log);
  const visible = drawn.filter((layer) => layer.points.length);
  const tables = visible.map(({ points }) => [points.map((point) => point[0]), points.map((point) => point[1])]);
  const inside = ({ x }) => x >= axis.low && x <= axis.high;
  return {
    height, data: uPlot.join(tables, tables.map(() => [0, 1])), series: visible.map(seriesOf), x: axis,
    marks: marks.filter(inside), bumps: bumps.filter(inside),
    y: { low: bottom, high: Math.min(top, y.most ?? Infinity), log: y.log, tick: y.tick },
    label: `${label} against ${axis.title}. The arrow keys read its values.`,
    read(place, pixel) {
      const columns = [...new Set(drawn.map((layer) => layer.column))].sort((a, b) => (a === "measured") - (b === "measured"));
      columns.sort((a, b) => a.startsWith("nearest") - b.startsWith("nearest"));
      const rows = new Map();
      for (const { index, name, column, points } of drawn) {
        const at = nearestPoint(points, place, pixel);
        if (at === null) continue;
        if (!rows.has(index)) rows.set(index, { key: swatch(index), name: shortened(name, 24), cells: columns.map(() => "") });
        rows.get(index).cells[columns.indexOf(column)] = format(points[at][1]);
      }
      const heading = [axis.text(place), why(place)].filter(Boolean).join(": ");
      return { heading, columns: columns.length > 1 ? columns : [], rows: [...rows.values()] };
    },
  };
}

// Round values along a logarithmic axis; over many decades, only some of the powers of ten.
function logSplits(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades < 2.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 6));
  const splits = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % every === 0) splits.push(...factors.map((factor) => factor * 10 ** power));
  }
  const inside = splits.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside : [low, high];
}

// A range with some air around the values.
function rangeOf(low, high, log) {
  if (log) return high > low ? [low / 1.08, high * 1.08] : [low / 2, high * 2];
  const air = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low === 0 ? 0 : low - air, high + air];
}

// Where a step's time goes: its parts, stacked, one chart for each run, all with the same scale.

function splitTotals(run) {
  return run.split.step.map((_, at) => DATA.parts.reduce((sum, _, part) => sum + (run.split[`part${part}`][at] ?? 0), 0));
}

// The first steps of a run compile and connect, and would flatten all others: a few tall ones are cut off.
function splitTop(runs) {
  const totals = runs.flatMap(splitTotals).sort((a, b) => a - b);
  if (!totals.length) return 0;
  const usual = 1.2 * totals[Math.floor(0.95 * (totals.length - 1))];
  const top = totals[totals.length - 1];
  return top > 2 * usual ? usual : top;
}

function splitView(run, runs, axisName) {
  const { split } = run;
  // Bytes differ too much between runs for one axis.
  const axis = axisFor(axisName, axisName === "bytes" ? [split] : runs.map((other) => other.split));
  // Each part is drawn with all below it, the tallest first.
  const sums = DATA.parts.map((_, part) => split.step.map((_, at) =>
    DATA.parts.slice(0, part + 1).reduce((sum, _, below) => sum + (split[`part${below}`][at] ?? 0), 0)));
  const layers = sums.map((values) => pointsOf(split, axis, axisName, false, values)).reverse();
  if (!layers[0].length) return "Nothing to draw.";
  const high = splitTop(runs) || 1;
  return {
    height: 220, x: axis, y: { low: 0, high, tick: shortSeconds },
    data: [layers[0].map((point) => point[0]), ...layers.map((points) => points.map((point) => point[1]))],
    series: layers.map((points, n) => {
      const part = DATA.parts.length - 1 - n;
      const shade = colour(`part-${part}`);
      return { label: DATA.parts[part], fill: shade, stroke: shade, width: 1, points: { show: points.length === 1, size: 7 } };
    }),
    label: `Time of a step${runs.length > 1 ? ` of ${run.name}` : ""} against ${axis.title}. The arrow keys read its values.`,
    read(place) {
      const at = split[axisName].lastIndexOf(place);
      const total = splitTotals(run)[at];
      const rows = DATA.parts.map((name, part) => {
        const value = split[`part${part}`][at];
        const share = value !== null && total ? `${Math.round((100 * value) / total)} %` : "";
        return { key: element("i", { class: `chip part-${part}` }), name, cells: [formatSeconds(value), share] };
      });
      rows.push({ key: element("i", { class: "chip" }), name: "step", cells: [formatSeconds(total), ""] });
      return { heading: axis.text(place), columns: [], rows };
    },
  };
}

// What a run's steps took on the whole, and how far the cut ones went.
function splitCaption(run, runs) {
  const { mean, longest } = run.step_seconds;
  const cut = splitTotals(run).some((total) => total > splitTop(runs) * 1.001);
  return `mean ${formatSeconds(mean)}` + (cut ? `, longest ${formatSeconds(longest)} (cut off)` : "");
}
