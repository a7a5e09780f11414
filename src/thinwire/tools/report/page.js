// The page: its state, its controls, and which chart shows what.

const DATA = JSON.parse(byId("data").textContent);
const state = { axis: "step", hidden: new Set(), logLoss: false, logTraffic: null, accuracyFromZero: true, smoothing: 0 };
const charts = [];

const shown = () => DATA.runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));
const single = DATA.runs.length === 1; // then its name is the title, and nowhere else
const has = (name) => DATA.runs.some((run) => run[name].value.some((value) => value !== null));

function layersOf(name, kind = "line") {
  return shown().filter(({ run }) => run[name].step.length)
    .map(({ run, index }) => ({ index, name: single ? "" : run.name, curve: run[name], values: run[name].value, kind, column: "" }));
}

// A chart of lines against the axis of the page, with the places where runs stopped or went on.
function linesOf(view) {
  return lineView({ ...view, axisName: state.axis, marks: marksOf(shown(), state.axis) });
}

function lossView() {
  const furthest = Math.max(...DATA.runs.map((run) => last(run.loss.step) ?? 0));
  const reach = (state.smoothing / 100) * furthest;
  const training = layersOf("loss").flatMap((layer) => withMeasured({ ...layer, column: "training" }, smoothed(layer.curve, reach)));
  const validation = layersOf("validation", "marks").map((layer) => ({ ...layer, column: "nearest validation" }));
  const layers = [...training, ...validation];
  const y = { log: state.logLoss, tick: shortNumber };
  return linesOf({ layers, y, height: 340, label: "Loss", format: formatLoss });
}

function accuracyView() {
  const layers = layersOf("accuracy", "marks");
  const y = { log: false, zero: state.accuracyFromZero, most: 1, tick: shortPercent };
  return linesOf({ layers, y, height: 260, label: "Validation accuracy in percent", format: formatPercent });
}

function trafficView() {
  const layers = layersOf("traffic").flatMap((layer) => withMeasured({ ...layer, column: "sent" }, smoothed(layer.curve, 0)));
  if (single) layers.push(...layersOf("dense", "reference").map((layer) => ({ ...layer, column: "dense" })));
  const y = { log: state.logTraffic, zero: true, tick: shortBytes };
  const bumps = shown().flatMap(({ run }) => bumpsOf(run, state.axis));
  return linesOf({ layers, y, height: 260, label: "Bytes per step", format: formatBytes, bumps, why: eventsAt });
}

// What sent further bytes at a place of the axis, in a page of one run.
function eventsAt(place) {
  if (!single) return "";
  const [{ traffic, events }] = DATA.runs;
  return new Map(events).get(traffic.step[traffic[state.axis].lastIndexOf(place)]) ?? "";
}

function trafficRange() {
  const values = [...layersOf("traffic"), ...(single ? layersOf("dense") : [])].flatMap((layer) => layer.values).filter((value) => value > 0);
  return [lowest(values), Math.max(0, highest(values))];
}

function addChart(parent, title, describe, { unit = () => "", tools = [], wide = false, level = "h2" } = {}) {
  const chart = new Chart(describe);
  const small = element("span", { class: "unit" });
  chart.caption = () => { small.textContent = unit(); };
  const tool = element("div", { class: "tools" }, ...tools);
  parent.append(element("figure", { class: wide ? "card wide" : "card" },
    element("figcaption", {}, title ? element(level, {}, title) : null, small, tool), chart.plot));
  charts.push(chart);
  new ResizeObserver(() => requestAnimationFrame(() => { if (chart.plot.clientWidth !== chart.width) chart.render(); })).observe(chart.plot);
  return chart;
}

function toggle(text, pressed, change) {
  const button = element("button", { type: "button", "aria-pressed": String(pressed) }, text);
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    change(now);
    renderAll();
  });
  return button;
}

function smoothingSlider() {
  const input = element("input", { type: "range", min: 0, max: 10, step: 0.5, value: 0, "aria-label": "Smoothing of the training loss" });
  input.addEventListener("input", () => { state.smoothing = Number(input.value); renderAll(); });
  return element("label", { class: "slider" }, "Smooth", input);
}

function fillLegend() {
  if (single) return;
  DATA.runs.forEach((run, index) => {
    const button = toggle("", true, (on) => (on ? state.hidden.delete(index) : state.hidden.add(index)));
    button.title = run.name;
    button.setAttribute("aria-label", run.name);
    button.append(swatch(index), element("span", {}, shortened(run.name, 33)));
    byId("legend").append(button);
  });
  byId("toolbar").classList.toggle("sticky", DATA.runs.length <= 6); // more would cover half a chart
}

function addCharts() {
  const parent = byId("charts");
  const thinned = DATA.runs.some((run) => run.loss.mean);
  const line = thinned ? "line: training, mean; shade: its lowest and highest" : "line: training";
  const key = () => line + (has("validation") ? "; marks: validation" : "");
  addChart(parent, "Loss", lossView, {
    wide: true, unit: key, tools: [smoothingSlider(), toggle("Log", false, (on) => { state.logLoss = on; })],
  });
  if (has("accuracy")) addChart(parent, "Accuracy", accuracyView, {
    unit: () => "validation, %", tools: [toggle("From 0 %", true, (on) => { state.accuracyFromZero = on; })],
  });
  if (has("traffic")) {
    const [low, high] = trafficRange();
    state.logTraffic = high / low > 20;
    addChart(parent, "Bytes per step", trafficView, {
      unit: () => `per rank${single ? "; dashed: dense" : ""}`,
      tools: [toggle("Log", state.logTraffic, (on) => { state.logTraffic = on; })], wide: !has("accuracy"),
    });
  }
}

function addSplits() {
  const runs = DATA.runs.filter((run) => run.split.part0.some((value) => value !== null));
  if (!runs.length) return;
  byId("split").hidden = false;
  byId("parts").append(...DATA.parts.map((name, part) =>
    element("li", {}, element("i", { class: `chip part-${part}` }), name)));
  for (const run of runs) {
    const index = DATA.runs.indexOf(run);
    const visible = () => runs.filter((other) => !state.hidden.has(DATA.runs.indexOf(other)));
    const unit = () => splitCaption(run, visible());
    const chart = addChart(byId("splits"), single ? "" : run.name, () => splitView(run, visible(), state.axis), { unit, level: "h3" });
    chart.run = index;
  }
}

function renderAll() {
  for (const chart of charts) {
    if (chart.run !== undefined) chart.plot.parentElement.hidden = state.hidden.has(chart.run);
    chart.caption();
    chart.render();
  }
}

fillHeader(DATA.runs);
fillSummary(DATA.runs);
fillLegend();
addCharts();
addSplits();
fillRanks(DATA.runs);
fillConfig(DATA.runs);
byId("command").textContent = DATA.command;
byId("made").textContent = `Made on ${DATA.date} by thinwire ${DATA.version}.`;
byId("axis").addEventListener("change", (event) => { state.axis = event.target.value; renderAll(); });
renderAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderAll); // a canvas does not follow by itself
