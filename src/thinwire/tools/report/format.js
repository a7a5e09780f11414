// Numbers as a person writes them: few digits, and a unit that keeps them short.

const MISSING = "–";

function grouped(value, decimals) {
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

// Three digits of 0.00123 are 0.00123, of 1234.5 they are 1,235: what stands before the point is never rounded away.
function significant(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  if (size < -4 || size > 9) return value.toExponential(digits - 1);
  return grouped(value, Math.max(0, digits - 1 - size));
}

const BYTES = [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12], ["PB", 1e15]];
const SECONDS = [["µs", 1e-6], ["ms", 1e-3], ["s", 1], ["min", 60], ["h", 3600]];

// The largest unit of which there is at least one in the value; of 0, that of which one is 1.
function unitOf(units, value) {
  if (value === 0) return units.find(([, size]) => size === 1);
  return units.filter(([, size]) => Math.abs(value) >= size).pop() ?? units[0];
}

function inUnit(units, value) {
  if (value === null || value === undefined) return MISSING;
  const [name, size] = unitOf(units, value);
  return `${name === "B" ? grouped(value, 0) : significant(value / size)} ${name}`;
}

// Along an axis: 20 kB, and not 20.0 kB.
function inShortUnit(units, value) {
  const [name, size] = unitOf(units, value * 1.0001);
  return `${Number((value / size).toPrecision(4))} ${name}`;
}

const formatBytes = (value) => inUnit(BYTES, value);
const shortBytes = (value) => inShortUnit(BYTES, value);
const shortSeconds = (value) => inShortUnit(SECONDS, value);
const formatSeconds = (value) => inUnit(SECONDS, value);
const formatCount = (value) => (value === null ? MISSING : grouped(value, 0));
const formatLoss = (value) => (value === null || value === undefined ? "not finite" : significant(value, 4));
const formatPercent = (value) => (value === null ? MISSING : `${grouped(100 * value, 1)} %`);

// Without an exponent where a few digits do.
const shortNumber = (value) => (value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(0) : String(Number(value.toPrecision(6))));
const shortPercent = (value) => `${Number((100 * value).toPrecision(4))} %`;

// 4,125 s are 1 h 8 min 45 s.
function formatDuration(seconds) {
  if (seconds === null) return MISSING;
  if (seconds < 60) return formatSeconds(seconds);
  const whole = Math.round(seconds);
  const parts = [[Math.floor(whole / 3600), "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([count]) => count > 0);
  return parts.slice(first, first + 2).filter(([count]) => count > 0).map((part) => part.join(" ")).join(" ");
}

// The ends of a long name tell runs apart better than its beginning alone.
function shortened(name, most) {
  const half = Math.floor((most - 1) / 2);
  return name.length > most ? `${name.slice(0, half)}…${name.slice(-half)}` : name;
}

function formatRatio(value) {
  return value >= 10 ? grouped(value, 0) : significant(value, 2);
}

// 123,456 parameters are 123 k.
function formatShort(value) {
  if (value === null) return MISSING;
  const [name, size] = unitOf([["", 1], [" k", 1e3], [" M", 1e6], [" G", 1e9]], value);
  return size === 1 ? grouped(value, 0) : significant(value / size) + name;
}
