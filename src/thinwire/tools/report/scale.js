// From values to pixels, and the round values to write along an axis.

// A unit's multiple is what is round: ticks of 90 s to 300 s on an axis in minutes stand at whole minutes.
function makeScale({ low, high, from, to, log = false, unit = 1, count = 6, whole = false, tickText = null }) {
  const bend = log ? Math.log10 : (value) => value;
  const [a, b] = [bend(low), bend(high)];
  const pixel = (value) => from + ((bend(value) - a) / (b - a || 1)) * (to - from);
  const valueAt = (place) => {
    const bent = a + ((place - from) / (to - from || 1)) * (b - a);
    return log ? 10 ** bent : bent;
  };
  const ticks = (log ? logTicks : linearTicks)(low / unit, high / unit, count, whole);
  return { pixel, valueAt, low, high, log, ticks: ticks.map(([value, text]) => [value * unit, tickText ? tickText(value) : text]) };
}

function stepOf(span, count, whole) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [[1.5, 1], [3.5, 2], [7.5, 5], [11, 10]].find(([below]) => rough / power < below)[1];
  const step = factor * power;
  return whole ? Math.max(1, step) : step;
}

function linearTicks(low, high, count, whole) {
  if (!(high > low)) return [[low, significant(low)]];
  const step = stepOf(high - low, count, whole);
  const decimals = Math.min(20, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    ticks.push([n * step, grouped(n * step || 0, decimals)]); // never -0
  }
  return ticks;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  const factors = decades * 3 <= count * 2 ? [1, 2, 5] : decades <= count ? [1, 3] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (power % every === 0 && value >= low * 0.9999 && value <= high * 1.0001) ticks.push([value, plain(value)]);
    }
  }
  return ticks.length > 1 ? ticks : linearTicks(low, high, count, false);
}

// 0.001 to 1,000 in full, the rest as a power.
function plain(value) {
  if (value < 0.0009 || value >= 1e6) return value.toExponential(0).replace("e+", "e");
  return grouped(value, Math.max(0, -Math.floor(Math.log10(value) + 1e-9)));
}

// A range with some air, whose ends are ticks where that costs little.
function roundedRange(low, high, count) {
  if (!(high > low)) {
    const air = Math.abs(low) * 0.1;
    return low === 0 ? [0, 1] : [low - air, high + air];
  }
  const step = stepOf(high - low, count, false);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

function loggedRange(low, high) {
  return high > low ? [low / 1.08, high * 1.08] : [low / 2, high * 2];
}
