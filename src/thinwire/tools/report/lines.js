// Charts of lines, one or two of each run: what is measured often as a line, what is measured seldom with marks on it.

// Every chart is drawn against the same axis, which the page switches.
const AXES = {
  step: { title: () => "steps", unit: () => ({ name: "", size: 1 }), text: (v) => `step ${grouped(v, 0)}`, whole: true },
  bytes: { title: (unit) => `${unit} sent per rank`, unit: (high) => unitOf(BYTES, high, 2), text: formatBytes },
  seconds: { title: (unit) => `${unit} of wall-clock time`, unit: (high) => unitOf(SECONDS, high, 3), text: formatDuration },
};

// The axis for these curves. Bytes become logarithmic where runs differ so much that one would be a vertical line.
function axisFor(name, curves) {
  const ends = curves.map((curve) => last(curve[name])).filter((end) => end !== null);
  const high = Math.max(...ends, 0);
  const log = name === "bytes" && Math.min(...ends) > 0 && high / Math.min(...ends) > 20;
  const axis = AXES[name];
  const unit = log ? { name: "bytes", size: 1 } : axis.unit(high); // over decades, each label has its own unit
  const starts = curves.flatMap((curve) => curve[name]).filter((value) => value > 0);
  return {
    low: log ? lowest(starts) : 0, high: high || 1, log, unit: unit.size, whole: axis.whole ?? false,
    tickText: log ? formatTickBytes : null, title: axis.title(unit.name) + (log ? ", logarithmic" : ""), text: axis.text,
  };
}

// Without Math.min(...values): tens of thousands of arguments overflow the stack.
const lowest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const highest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function last(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null) return values[at];
  return null;
}

// The points of a curve that can be drawn: [x, y], with y null where a line must break.
function pointsOf(curve, axis, name, logY, values = curve.value) {
  const points = [];
  curve[name].forEach((x, at) => {
    if (x === null || (axis.log && x <= 0)) return;
    const y = values[at];
    points.push([x, y === null || (logY && y <= 0) ? null : y]);
  });
  return points;
}

function pathOf(points, x, y) {
  let path = "";
  let open = false;
  points.forEach(([px, py], at) => {
    if (py === null) open = false;
    else {
      const place = `${x.pixel(px).toFixed(1)} ${y.pixel(py).toFixed(1)}`;
      const alone = !open && (at + 1 === points.length || points[at + 1][1] === null);
      path += open ? `L${place}` : `M${place}${alone ? "h0" : ""}`; // round ends make a dot of a line without length
      open = true;
    }
  });
  return path;
}

// The index of the point to read at this place; null where the run has not begun or is over.
function nearestPoint(points, place, x) {
  const distance = (at) => Math.abs(x.pixel(points[at][0]) - x.pixel(place));
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
  return [{ ...layer, values, column: `${layer.column}, mean` }, { ...layer, kind: "faint", column: "measured" }];
}

// What a chart of lines draws. `layers`: [{ index, name, curve, values, kind, column }]. The kind is "line", "faint" or
// "marks"; the column, that of the tooltip, in which there is one row for each run.
function lineView({ layers, axisName, y, height, label, format }) {
  if (!layers.length) return "Nothing to draw.";
  const axis = axisFor(axisName, layers.map((layer) => layer.curve));
  const drawn = layers.map((layer) => ({ ...layer, points: pointsOf(layer.curve, axis, axisName, y.log, layer.values) }));
  const values = drawn.flatMap((layer) => layer.points.map((point) => point[1])).filter((value) => value !== null);
  if (!values.length) return "Nothing to draw.";
  const [low, high] = [lowest(values), highest(values)];
  const count = Math.max(2, Math.round((height - 54) / 48));
  const [bottom, top] = y.log ? loggedRange(low, high) : roundedRange(y.zero ? Math.min(0, low) : low, high, count);
  const places = [...new Set(drawn.flatMap((layer) => layer.points.map((point) => point[0])))].sort((a, b) => a - b);
  let scaleX = null;
  return {
    height, places, x: axis, y: { low: bottom, high: Math.min(top, y.most ?? Infinity), log: y.log, unit: y.unit?.(high) ?? 1 },
    label: `${label} against ${axis.title}. The arrow keys read its values.`,
    draw(group, x, scaleY) {
      scaleX = x;
      for (const { index, points, kind } of drawn) {
        const run = svg("g", { class: `curve ${colourOf(index)} ${kind}`, "data-run": index });
        run.append(svg("path", { class: "line", d: pathOf(points, x, scaleY), "stroke-dasharray": dashOf(index) }));
        const known = points.filter((point) => point[1] !== null);
        if (kind === "marks" && known.length <= 60) {
          const d = known.map(([px, py]) => markOf(index, x.pixel(px), scaleY.pixel(py), 3.5)).join("");
          run.append(svg("path", { class: "mark", d }));
        }
        if (kind === "faint") group.prepend(run);
        else group.append(run);
      }
    },
    read(place) {
      const columns = [...new Set(drawn.map((layer) => layer.column))];
      const rows = new Map();
      const points = [];
      for (const { index, name, kind, column, points: measured } of drawn) {
        const at = nearestPoint(measured, place, scaleX);
        if (at === null) continue;
        const [px, py] = measured[at];
        if (py !== null && kind !== "faint") points.push([index, px, py]);
        if (!rows.has(index)) rows.set(index, { key: swatch(index), name: shortened(name, 24), cells: columns.map(() => "") });
        rows.get(index).cells[columns.indexOf(column)] = format(py);
      }
      return { heading: axis.text(place), columns: columns.length > 1 ? columns : [], rows: [...rows.values()], points };
    },
  };
}
