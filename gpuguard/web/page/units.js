"use strict";
// Numbers in words, as gpuguard/units.py writes them; null where there is none.
const UNITS = {
  bytes(count) {
    if (count === null || count === undefined) return null;
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let place = 0;
    while (Math.abs(count) >= 1000 && place < units.length - 1) { count /= 1024; place += 1; }
    return `${place > 2 ? count.toFixed(1) : Math.round(count)}${units[place]}`;
  },
  duration(seconds) {
    if (seconds === null || seconds === undefined) return null;
    if (seconds > 0 && seconds < 1) return `${Math.round(seconds * 1000)}ms`;
    let whole = Math.floor(Math.max(seconds, 0));
    const parts = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]].map(([width, unit]) => {
      const count = Math.floor(whole / width); whole -= count * width; return [count, unit];
    });
    const first = parts.findIndex(([count]) => count > 0);
    return first < 0 ? "0s" : parts.slice(first, first + 2).filter(([count]) => count).map((part) => part.join("")).join("");
  },
};
