"use strict";
// The one place of the page where numbers and times become text.  Sizes and durations as gpuguard/units.py writes them;
// null where there is none.
const UNITS = {
  isUnknown: (value) => value === null || value === undefined,
  bytes(count) {
    if (UNITS.isUnknown(count)) return null;
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = 0;
    while (Math.abs(count) >= 1000 && step < units.length - 1) { count /= 1024; step += 1; }
    return `${step > 2 ? count.toFixed(1) : Math.round(count)}${units[step]}`;
  },
  rate: (bytes) => (UNITS.isUnknown(bytes) ? null : `${UNITS.bytes(bytes)}/s`),
  // *names* of day, hour, minute, second and millisecond.
  duration(seconds, names = ["d", "h", "m", "s", "ms"]) {
    if (UNITS.isUnknown(seconds)) return null;
    if (seconds > 0 && seconds < 1) return `${Math.round(seconds * 1000)}${names[4]}`;
    let whole = Math.floor(Math.max(seconds, 0));
    const parts = [86400, 3600, 60, 1].map((width, place) => {
      const count = Math.floor(whole / width); whole -= count * width; return [count, names[place]];
    });
    const first = parts.findIndex(([count]) => count > 0);
    return first < 0 ? `0${names[3]}` : parts.slice(first, first + 2).filter(([count]) => count).map((part) => part.join("")).join("");
  },
  rounded: (value, unit, digits = 0) => (UNITS.isUnknown(value) ? null : `${value.toFixed(digits)}${unit}`),
  energy(wattHours) {
    if (wattHours >= 100) return `${(wattHours / 1000).toFixed(2)}kWh`;
    return wattHours >= 1 ? `${wattHours.toFixed(1)}Wh` : `${Number(wattHours.toPrecision(2))}Wh`;
  },
  clock: (at, language, { seconds = true } = {}) => new Date(at * 1000).toLocaleTimeString(language,
    { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined, hourCycle: "h23" }),
  day: (at, language) => new Date(at * 1000).toLocaleDateString(language, { month: "short", day: "numeric" }),
  weekday: (at, language) => new Date(at * 1000).toLocaleDateString(language, { weekday: "short" }),
  // A fact of an event: its name without the unit, and its value with one; as gpuguard/views/events.py writes them.
  fact(name, value, language, names) {
    if (typeof value !== "number") return [name, value];
    const bare = name.replace(/_(unix_seconds|seconds|bytes|percent|joules)$/, "");
    const texts = {
      unix_seconds: () => `${UNITS.day(value, language)} ${UNITS.clock(value, language)}`,
      seconds: () => UNITS.duration(value, names),
      bytes: () => UNITS.bytes(value),
      percent: () => `${Number(value.toPrecision(6))}%`,
      joules: () => UNITS.energy(value / 3600),
    };
    return [bare, texts[name.slice(bare.length + 1)]?.() ?? String(Number(value.toPrecision(6)))];
  },
};
// What is drawn: the field of a device, and how a chart shows it.
const METRICS = {
  utilization: { field: "utilization_percent", unit: "%", divisor: 1, digits: 0 },
  memory: { field: "memory_used_bytes", unit: " GiB", divisor: 2 ** 30, digits: 1 },
  temperature: { field: "temperature_celsius", unit: " °C", divisor: 1, digits: 0 },
  power: { field: "power_draw_watts", unit: " W", divisor: 1, digits: 0 },
};
const SPANS = { minute: 60, ten: 600, hour: 3600, half: 43200, week: 604800, year: 34560000 };
