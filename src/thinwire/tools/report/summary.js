// The figures at the top: cards for one run, a table for several. And the configuration at the end.

function figuresOf({ summary }) {
  const validated = summary.validation.length > 0;
  const measured = summary.training.length > 0;
  return [
    {
      label: validated || !measured ? "Validation loss" : "Training loss",
      value: validated ? formatLoss(summary.validation[0]) : measured ? formatLoss(summary.training[0]) : MISSING,
      note: validated && measured ? `training ${formatLoss(summary.training[0])}` : "",
    },
    { label: "Accuracy", value: formatPercent(summary.accuracy), note: summary.accuracy === null ? "" : "validation" },
    {
      label: "Sent per rank",
      value: formatBytes(summary.bytes),
      note: summary.dense ? `dense ${formatBytes(summary.dense)}` : "",
    },
    { label: "Reduction", value: summary.bytes && summary.dense ? times(summary.dense / summary.bytes) : MISSING, note: "whole run" },
    {
      label: "After the warm-up",
      value: summary.reduction_after_warmup ? times(summary.reduction_after_warmup) : MISSING,
      note: summary.resumes ? "since the last resume" : "reduction",
    },
    {
      label: "Wall-clock",
      value: formatDuration(summary.seconds),
      note: summary.seconds ? `${significant(summary.step / summary.seconds)} steps/s` : "",
    },
    { label: "Ranks", value: summary.ranks, note: summary.parameters === null ? "" : `${formatShort(summary.parameters)} parameters` },
  ];
}

const times = (ratio) => `${formatRatio(ratio)}x`;

function statusOf({ status, summary }) {
  const total = summary.steps && summary.steps !== summary.step ? ` of ${formatCount(summary.steps)}` : "";
  const reached = `${formatCount(summary.step)}${total} steps`;
  const word = { finished: "finished", stopped: "stopped", failed: "failed", unfinished: "not finished" }[status];
  const resumed = summary.resumes ? `, resumed ${summary.resumes === 1 ? "once" : `${summary.resumes} times`}` : "";
  return element("span", { class: `status ${status}` }, `${word}, ${reached}${resumed}`);
}

function fillHeader(runs) {
  const [{ name, summary }] = runs;
  const title = runs.length === 1 ? name : `${runs.length} runs`;
  document.title = `${title} · thinwire report`;
  byId("title").textContent = title;
  const known = (...texts) => texts.filter((text) => text && text !== MISSING);
  if (runs.length === 1) {
    const recipe = name.startsWith(summary.recipe) ? "" : summary.recipe; // a folder is named after it
    const facts = known(recipe, summary.model, summary.compressor, summary.started.slice(0, 10));
    byId("subtitle").append(statusOf(runs[0]), ...facts.map((fact) => element("span", {}, fact)));
  } else {
    byId("subtitle").append(...new Set(runs.flatMap((run) => known(run.summary.recipe))));
  }
}

function fillSummary(runs) {
  const present = (at) => runs.some((run) => figuresOf(run)[at].value !== MISSING);
  const shown = figuresOf(runs[0]).map((_, at) => at).filter(present);
  if (runs.length === 1) {
    byId("summary").append(element("dl", { class: "cards" }, ...shown.map((at) => {
      const { label, value, note } = figuresOf(runs[0])[at];
      return element("div", {}, element("dt", {}, label), element("dd", {}, element("b", {}, value), element("small", {}, note)));
    })));
    return;
  }
  // Runs without a validation have their training loss in the same column, and say so.
  const labels = figuresOf(runs.find((run) => run.summary.validation.length) ?? runs[0]).map(({ label }) => label);
  const head = element("tr", {}, element("th", { scope: "col" }, "Run"),
    ...shown.map((at) => element("th", { scope: "col" }, labels[at])));
  const rows = runs.map((run, index) => element("tr", {},
    element("th", { scope: "row" }, element("span", { class: "name" }, swatch(index), element("span", {}, run.name)),
      element("small", {}, run.summary.compressor === MISSING ? "" : run.summary.compressor), statusOf(run)),
    ...shown.map((at) => {
      const { label, value, note } = figuresOf(run)[at];
      const other = label === labels[at] ? note : label.toLowerCase();
      return element("td", { "data-label": labels[at] }, element("b", {}, value), element("small", {}, other));
    })));
  byId("summary").append(element("table", { class: "runs" }, element("thead", {}, head), element("tbody", {}, ...rows)));
}

// One row for each rank: who sent what. Columns that no run has are left out.
function fillRanks(runs) {
  const ranks = runs.flatMap((run) => run.ranks.map((rank) => ({ run: run.name, ...rank })));
  const sharded = ranks.some(({ replica }) => replica !== null);
  const apart = ranks.some(({ inside }) => inside);
  const columns = [
    runs.length > 1 && ["Run", ({ run }) => run],
    ["Rank", ({ rank }) => formatCount(rank)],
    sharded && ["Replica", ({ replica }) => formatCount(replica)],
    sharded && ["Shard", ({ shard }) => formatCount(shard)],
    [sharded ? "To other replicas" : apart ? "Between nodes" : "Sent", ({ between }) => formatBytes(between)],
    apart && ["Inside nodes", ({ inside }) => formatBytes(inside)],
    ["Dense", ({ dense }) => formatBytes(dense)],
  ].filter(Boolean);
  byId("ranks").hidden = ranks.length < 2;
  byId("ranks").querySelector("table").append(
    element("thead", {}, element("tr", {}, ...columns.map(([name]) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...ranks.map((rank) => element("tr", {}, ...columns.map(([, text]) => element("td", {}, text(rank)))))));
}

// One row for each setting, one column for each run; what differs between runs stands out.
function fillConfig(runs) {
  const settings = runs.map((run) => new Map(run.config));
  const names = [...new Set(runs.flatMap((run) => run.config.map(([name]) => name)))];
  const rows = names.map((name) => {
    const values = settings.map((setting) => setting.get(name) ?? MISSING);
    const differs = values.some((value) => value !== values[0]);
    return element("tr", { class: differs ? "differs" : null }, element("th", { scope: "row" }, name),
      ...values.map((value) => element("td", {}, value)));
  });
  const head = element("tr", {}, element("td", {}), ...runs.map((run, index) => element("th", { scope: "col" }, swatch(index), run.name)));
  byId("config").querySelector("table").append(runs.length > 1 ? element("thead", {}, head) : "", element("tbody", {}, ...rows));
}
