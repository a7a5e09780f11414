// Where a step's time goes: areas of its parts, stacked, one chart for each run, all with the same scale.

function splitTotals(run) {
  return run.split.step.map((_, at) => DATA.parts.reduce((sum, _, part) => sum + (run.split[`part${part}`][at] ?? 0), 0));
}

// The first steps of a run compile and connect, and would flatten all others: a few tall ones are cut off.
function splitTop(runs) {
  const totals = runs.flatMap(splitTotals).sort((a, b) => a - b);
  if (!totals.length) return 0;
  const usual = 1.2 * totals[Math.floor(0.95 * (totals.length - 1))];
  const highest = totals[totals.length - 1];
  return highest > 2 * usual ? usual : highest;
}

function splitView(run, runs, axisName) {
  const { split } = run;
  // Bytes differ too much between runs for one axis.
  const axis = axisFor(axisName, axisName === "bytes" ? [split] : runs.map((other) => other.split));
  const places = split[axisName].filter((x) => x !== null);
  if (!places.length) return "Nothing to draw.";
  const high = splitTop(runs) || 1;
  const unit = unitOf(SECONDS, high);
  return {
    height: 220, places, x: axis, y: { low: 0, high, unit: unit.size },
    label: `Time of a step of ${run.name}, in ${unit.name}, against ${axis.title}. The arrow keys read its values.`,
    draw(group, x, y) {
      const floor = split.step.map(() => 0);
      DATA.parts.forEach((_, part) => {
        const roof = floor.map((value, at) => value + (split[`part${part}`][at] ?? 0));
        const at = split.step.map((_, n) => n).filter((n) => split[axisName][n] !== null && split[`part${part}`][n] !== null);
        const corner = (n, value) => `${x.pixel(split[axisName][n]).toFixed(1)} ${y.pixel(Math.min(value, high)).toFixed(1)}`;
        const edge = [...at.map((n) => corner(n, roof[n])), ...at.reverse().map((n) => corner(n, floor[n]))];
        if (edge.length) group.append(svg("path", { class: `area part-${part}`, d: `M${edge.join("L")}Z` }));
        roof.forEach((value, n) => { floor[n] = value; });
      });
    },
    read(place) {
      const at = split[axisName].indexOf(place);
      const total = splitTotals(run)[at];
      const rows = DATA.parts.map((name, part) => {
        const value = split[`part${part}`][at];
        const share = value !== null && total ? `${Math.round((100 * value) / total)} %` : "";
        return { key: element("i", { class: `chip part-${part}` }), name, cells: [formatSeconds(value), share] };
      });
      rows.push({ key: element("i", { class: "chip" }), name: "step", cells: [formatSeconds(total), ""] });
      return { heading: axis.text(place), columns: [], rows, points: [] };
    },
  };
}

// What a run's steps took on the whole, and how far the cut ones went.
function splitCaption(run, runs) {
  const { mean, longest } = run.step_seconds;
  const cut = splitTotals(run).some((total) => total > splitTop(runs) * 1.001);
  return `mean ${formatSeconds(mean)}` + (cut ? `, longest ${formatSeconds(longest)} (cut off)` : "");
}
