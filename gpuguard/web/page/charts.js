"use strict";
// What is drawn: the sparkline of a card, the week of a device, and the chart.  Unknown leaves a gap, never a 0.
const CHARTS = {
  COLOURS: ["#4493f8", "#3fb950", "#d29922", "#f85149", "#ab7df8", "#39c5cf", "#db61a2", "#9198a1"],
  SPARK: { seconds: 600, parts: 30, height: 30 },

  async fetched(metric, seconds, { until, step } = {}) {
    const query = new URLSearchParams({ metric, seconds });
    if (until) query.set("until", until);
    if (step) query.set("step", step);
    const answer = await fetch(`api/chart?${query}`);
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.json();
  },

  // Means of equal parts of a time; null where nothing is known.
  parts(times, values, begin, seconds, count) {
    const sums = new Array(count).fill(0), known = new Array(count).fill(0);
    times.forEach((at, number) => {
      const part = Math.floor((at - begin) / seconds * count);
      if (part < 0 || part >= count || UNITS.isUnknown(values[number])) return;
      sums[part] += values[number];
      known[part] += 1;
    });
    return sums.map((sum, part) => (known[part] ? sum / known[part] : null));
  },

  // An SVG of values in percent; *label* says the same in words.
  spark(values, label) {
    const { height } = CHARTS.SPARK, width = values.length * 10;
    let path = "", joined = false;
    values.forEach((value, number) => {
      if (value === null) { joined = false; return; }
      const at = `${number * 10} ${(height - 1 - value / 100 * (height - 2)).toFixed(1)}`;
      path += joined ? `L${at}` : `M${at}h8`;
      joined = true;
    });
    return make("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      make("path", { d: path || "M0 0" }));
  },

  // Values in percent as cells side by side, the deeper the more.
  strip(canvas, values) {
    const colour = getComputedStyle(document.documentElement).getPropertyValue("--bar").trim();
    const rule = getComputedStyle(document.documentElement).getPropertyValue("--rule").trim();
    canvas.width = values.length;
    canvas.height = 8;
    const pen = canvas.getContext("2d");
    values.forEach((value, number) => {
      pen.globalAlpha = value === null ? 1 : 0.08 + 0.92 * value / 100;
      pen.fillStyle = value === null ? rule : colour;
      if (value === null) pen.fillRect(number, 3, 1, 1);  // a thin line: no sample
      else pen.fillRect(number, 0, 1, 8);
    });
  },

  // Of uPlot: *lines* are { name, colour }, *period* gives [begin, end], *zoom* is told what was marked.
  options({ width, lines, metric, period, language, timeWord, zoom }) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--dim").trim(), rule = style.getPropertyValue("--rule").trim();
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
    const { unit, digits } = METRICS[metric], [begin, end] = period(), seconds = end - begin;
    const day = (at) => UNITS.day(at, language), clock = (at, how) => UNITS.clock(at, language, how);
    return {
      width, height: 240,
      cursor: { drag: { x: true, y: false, setScale: false } },
      hooks: { setSelect: [(plot) => {
        const { left, width: wide } = plot.select;
        if (wide > 5) zoom(plot.posToVal(left, "x"), plot.posToVal(left + wide, "x"));
      }] },
      series: [{ label: timeWord, value: (_, at) => (at ? `${seconds > 40000 ? `${day(at)} ` : ""}${clock(at)}` : "–") },
        ...lines.map(({ name, colour }) => ({
          label: name, stroke: colour, width: 1.5, spanGaps: false, points: { show: false },
          value: (_, value) => UNITS.rounded(value, unit, digits) ?? "–",
        }))],
      scales: {
        x: { range: period },
        y: { range: (_, low, high) => (metric === "utilization" ? [0, 100] : [0, Math.max(1, (high ?? 1) * 1.05)]) },
      },
      axes: [
        { ...axis, space: 70, values: (_, all) => all.map((at) => (seconds > 172800 ? day(at) : clock(at, { seconds: seconds <= 600 }))) },
        { ...axis, size: 64, values: (_, all) => all.map((tick) => `${tick}${unit}`) },
      ],
      legend: { live: true },
    };
  },
  colour: (number, count) => (count <= CHARTS.COLOURS.length ? CHARTS.COLOURS[number] : `hsl(${Math.round(360 * number / count)} 65% 55%)`),
};
