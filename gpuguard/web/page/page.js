"use strict";
// The page writes text (textContent), never markup: what a user calls a job stays a name.
(() => {
  const byId = (id) => document.getElementById(id);
  const SPANS = { minute: 60, ten: 600, hour: 3600, half: 43200, week: 604800, year: 34560000 };
  const SORTS = ["index", "memory", "utilization", "temperature"];
  const COLOURS = ["#4493f8", "#3fb950", "#d29922", "#f85149", "#ab7df8", "#39c5cf", "#db61a2", "#9198a1"];
  const kept = (name, other) => { try { return localStorage.getItem(name) || other; } catch { return other; } };
  const keep = (name, value) => { try { localStorage.setItem(name, value); } catch { /* private window */ } };

  let language = kept("language", (navigator.language || "en").startsWith("zh") ? "zh" : "en");
  let theme = kept("theme", matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  let metric = kept("metric", "utilization"), span = kept("span", "ten"), sort = kept("sort", "index");
  let last = null, stream = null, plot = null, drawn = null, asked = 0;

  function word(key, ...values) {
    const text = WORDS[language][key] ?? WORDS.en[key] ?? key;
    return values.reduce((so_far, value) => so_far.replace("{}", value), text);
  }
  function make(tag, text, kind) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  }
  const size = (bytes) => UNITS.bytes(bytes) ?? word("unknown");
  const rate = (bytes) => UNITS.rate(bytes) ?? word("unknown");
  const time = (seconds) => UNITS.duration(seconds) ?? word("unknown");
  const number = (value, unit) => UNITS.rounded(value, unit) ?? word("unknown");
  const clock = (at, how) => UNITS.clock(at, language, how);
  const day = (at) => UNITS.day(at, language);

  function meter(name, share, text, level) {
    const row = make("div", undefined, "meter"), bar = make("div"), fill = make("i", undefined, level);
    fill.style.width = `${Math.max(0, Math.min(100, share ?? 0))}%`;
    bar.append(fill);
    row.append(make("span", name), bar, make("span", text));
    return row;
  }
  const level = (value, warn, bad) => (value >= bad ? "bad" : value >= warn ? "warn" : "");

  function card(device, seen) {
    const bad = ["unhealthy", "quarantined", "unclaimed_use"].includes(device.exact_state);
    const node = make("article", undefined, bad ? "card bad" : "card"), title = make("h3");
    const state = { idle: "idle_state", unknown: "unknown_state" }[device.exact_state] ?? device.exact_state;
    title.append(make("span", device.label), make("span", (device.name ?? word("unknown")).replace("NVIDIA ", "")),
      make("span", word(state), `state ${device.exact_state}`));
    const full = device.memory_total_bytes ? 100 * device.memory_used_bytes / device.memory_total_bytes : null;
    const watts = device.power_limit_watts ? 100 * device.power_draw_watts / device.power_limit_watts : null;
    node.append(title,
      meter(word("memory"), full, `${size(device.memory_used_bytes)} / ${size(device.memory_total_bytes)}`, level(full, 90, 98)),
      meter(word("utilization"), device.utilization_percent, number(device.utilization_percent, "%")),
      meter(word("temperature"), device.temperature_celsius, number(device.temperature_celsius, "°C"), level(device.temperature_celsius, 80, 88)),
      meter(word("power"), watts, number(device.power_draw_watts, "W")));
    const flow = seen.throughput && seen.throughput[device.uuid];
    if (flow) node.append(make("p", word("pcie", rate(flow.received), rate(flow.sent)), "flow"));
    if (flow && flow.nvlink_received != null) {
      node.append(make("p", word("nvlink", rate(flow.nvlink_received), rate(flow.nvlink_sent)), "flow"));
    }
    if (device.reason) node.append(make("p", device.reason, "reason"));
    const list = make("ul", undefined, "who");
    const said = new Map();
    for (const claim of device.claims) {
      const command = (claim.command ?? []).join(" "), row = make("li", undefined, "claim");
      said.set(claim.id, command);
      row.append(make("b", claim.user ?? word("unknown")), [` ${word("since", time(claim.since && seen.taken_at - claim.since))}`,
        claim.memory_bytes ? word("shared", size(claim.memory_bytes)) : "", claim.idle ? word("idle") : "",
        claim.orphaned ? word("orphaned") : "", claim.stopped ? word("stopped") : "", claim.note ?? "", command].filter(Boolean).join(" · "));
      list.append(row);
    }
    for (const process of (device.processes ?? []).slice(0, 8)) {
      const command = (process.command ?? [process.executable ?? ""]).join(" "), row = make("li");
      row.append(make("b", process.user ?? word("unknown")), [` ${process.pid}`, size(process.memory_used_bytes),
        process.claim || process.computes === false ? "" : word("unclaimed"), said.get(process.claim) === command ? "" : command].filter(Boolean).join(" · "));
      list.append(row);
    }
    const more = (device.processes ?? []).length - 8;
    if (more > 0) list.append(make("li", word("more", more)));
    node.append(list);
    return node;
  }

  function table(id, heads, rows) {
    const node = byId(id), head = make("tr");
    for (const [text, kind] of heads) head.append(make("th", text, kind));
    node.replaceChildren(head, ...rows.map((cells) => {
      const row = make("tr");
      cells.forEach((text, column) => row.append(make("td", text, heads[column][1])));
      return row;
    }));
  }

  function show(seen) {
    if (seen.error) { status(seen.error, true); return; }
    const first = !last;
    last = seen;
    byId("nothing").hidden = seen.devices.length > 0;
    document.title = `gpuguard ${seen.host}`;
    byId("title").textContent = `gpuguard · ${seen.host}${seen.simulated ? ` · ${word("simulated")}` : ""}`;
    status(seen.age_seconds === null ? word("live") : word("seen", time(Math.round(seen.age_seconds))), false);
    const key = METRICS[sort]?.field, shown = key ? [...seen.devices].sort((left, right) => (right[key] ?? -1) - (left[key] ?? -1)) : seen.devices;
    byId("cards").replaceChildren(...shown.map((device) => card(device, seen)));
    byId("line").hidden = !seen.line.length;
    table("line-table", [[word("place"), "number"], [word("user")], [word("gpus"), "number"], [word("waited"), "number"], [word("start")], [word("what")]],
      seen.line.map((job) => [job.number, job.user, job.num_gpus, time(Math.round(job.waited_seconds)), when(job), [job.note, (job.command ?? []).join(" ")].filter(Boolean).join("  ")]));
    table("users-table", [[word("user")], [word("gpus"), "number"], [word("processes"), "number"], [word("used"), "number"], [word("claimed_count"), "number"], [word("idle_count"), "number"]],
      seen.users.map((row) => [row.user ?? word("unknown"), row.devices, row.processes, size(row.memory_used_bytes), row.claimed, row.idle]));
    const use = seen.host_use;
    byId("host-use").textContent = [word("cpu", number(use.cpu_percent, "%"), use.cpu_count ?? word("unknown")),
      word("ram", size(use.memory_used_bytes), size(use.memory_total_bytes)),
      word("disk", rate(use.disk_read_bytes_per_second), rate(use.disk_write_bytes_per_second)),
      word("net", rate(use.network_received_bytes_per_second), rate(use.network_sent_bytes_per_second))].join(" · ");
    table("events-table", [[word("time"), "number"], [word("gpu"), "number"], [word("user")], [word("what")], [word("remark")]],
      [...seen.events].reverse().map((event) => [`${day(event.time)} ${clock(event.time)}`, event.devices.join(", "), event.user,
        `${event.kind} ${event.outcome}`, note(event)]));
    byId("none").hidden = seen.events.length > 0;
    byId("gaps").hidden = !seen.unknown.length;
    byId("gap-list").replaceChildren(...seen.unknown.slice(0, 40).map((text) => make("li", text)));
    if (first) draw(); else extend(seen);
  }
  function when(job) {
    if (!job.expected_start) return job.why;
    const isFar = job.expected_start - Date.now() / 1000 > 72000;
    return `${word("about", isFar ? `${day(job.expected_start)} ` : "")}${clock(job.expected_start, { seconds: false })} · ${job.why}`;
  }
  function note(event) {
    const facts = event.facts.map(([name, value]) => UNITS.fact(name, value, language).join(" "));
    return [event.message, facts.join(", ")].filter(Boolean).join("; ");
  }
  function status(text, bad) {
    byId("status").textContent = text;
    byId("status").className = bad ? "bad" : "";
  }

  function listen() {
    if (stream) stream.close();
    stream = new EventSource(byId("curious").checked ? "api/stream?throughput=1" : "api/stream");
    stream.onmessage = (message) => show(JSON.parse(message.data));
    stream.onerror = () => {
      status(word("lost"), true);
      if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
    };
  }

  const scaled = (value) => (UNITS.isUnknown(value) ? null : value / METRICS[metric].divisor);
  const colour = (number, count) => (count <= COLOURS.length ? COLOURS[number] : `hsl(${Math.round(360 * number / count)} 65% 55%)`);

  // Asks for the whole chart; between two times the stream brings the new points (extend).
  async function draw() {
    const wanted = `${metric}|${span}`;
    let chart;
    asked = Date.now();
    try {
      const answer = await fetch(`api/chart?metric=${metric}&seconds=${SPANS[span]}`);
      if (!answer.ok) return;
      chart = await answer.json();
    } catch { return; }
    if (wanted !== `${metric}|${span}`) return;
    const names = new Map((last?.devices ?? []).map((device) => [device.uuid, device.label]));
    const uuids = Object.keys(chart.values).sort((left, right) => (names.get(left) ?? "").localeCompare(names.get(right) ?? "", undefined, { numeric: true }));
    const rows = [chart.times, ...uuids.map((uuid) => chart.values[uuid].map(scaled))];
    const look = [metric, span, theme, language, byId("chart").clientWidth, ...uuids.map((uuid) => names.get(uuid))].join("|");
    if (plot && drawn.look === look) { drawn.rows = rows; plot.setData(rows); return; }
    if (plot) plot.destroy();
    drawn = { look, uuids, rows };
    plot = new uPlot(options(uuids, names), rows, byId("chart"));
  }
  function options(uuids, names) {
    const style = getComputedStyle(document.documentElement), seconds = SPANS[span];
    const ink = style.getPropertyValue("--dim").trim(), rule = style.getPropertyValue("--rule").trim();
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
    const ticks = (_, all) => all.map((at) => (seconds > 172800 ? day(at) : clock(at, { seconds: seconds <= 600 })));
    return {
      width: Math.max(200, byId("chart").clientWidth - 18), height: 240,
      cursor: { drag: { x: false, y: false } },
      series: [{ label: word("time"), value: (_, at) => (at ? `${seconds > 40000 ? `${day(at)} ` : ""}${clock(at)}` : "–") },
        ...uuids.map((uuid, number) => ({
          label: `GPU ${names.get(uuid) ?? uuid.slice(0, 8)}`, stroke: colour(number, uuids.length), width: 1.5, spanGaps: false,
          value: (_, value) => UNITS.rounded(value, METRICS[metric].unit, METRICS[metric].digits) ?? "–",
        }))],
      scales: {
        x: { range: () => [Date.now() / 1000 - seconds, Date.now() / 1000] },
        y: { range: (_, low, high) => (metric === "utilization" ? [0, 100] : [0, Math.max(1, (high ?? 1) * 1.05)]) },
      },
      axes: [{ ...axis, values: ticks, space: 70 }, { ...axis, size: 64, values: (_, all) => all.map((tick) => `${tick}${METRICS[metric].unit}`) }],
      legend: { live: true },
    };
  }
  function extend(seen) {
    const seconds = SPANS[span];
    if (!plot || document.hidden) return;
    if (seconds > 600 || seen.devices.length !== drawn.uuids.length) {
      if (Date.now() - asked > (seconds > 600 ? 30000 : 4000)) draw();
      return;
    }
    const [times] = drawn.rows, from = times.findIndex((at) => at >= seen.taken_at - seconds);
    if (times.length && seen.taken_at <= times[times.length - 1]) return;
    const values = new Map(seen.devices.map((device) => [device.uuid, device[METRICS[metric].field]]));
    const rest = (row) => row.slice(Math.max(0, from));
    drawn.rows = [[...rest(times), seen.taken_at], ...drawn.uuids.map((uuid, row) => [...rest(drawn.rows[row + 1]), scaled(values.get(uuid))])];
    plot.setData(drawn.rows);
  }

  function choices(id, keys, chosen, choose) {
    byId(id).replaceChildren(...keys.map((key) => {
      const button = make("button", word(key));
      button.type = "button";
      button.setAttribute("aria-pressed", String(key === chosen));
      button.addEventListener("click", () => choose(key));
      return button;
    }));
  }
  function dress() {
    document.documentElement.lang = language;
    document.documentElement.dataset.theme = theme;
    for (const id of ["devices", "line", "charts", "users", "host", "events", "gaps"]) byId(`${id}-title`).textContent = word(id);
    byId("language").textContent = word("other");
    byId("theme").textContent = word(theme === "dark" ? "light" : "dark");
    byId("curious-label").textContent = word("curious");
    byId("chart-note").textContent = word("note");
    choices("metrics", Object.keys(METRICS), metric, (key) => { metric = key; keep("metric", key); dress(); });
    choices("sorts", SORTS, sort, (key) => { sort = key; keep("sort", key); dress(); });
    byId("sort").textContent = word("sort");
    byId("nothing").textContent = word("no_device");
    byId("none").textContent = word("none");
    choices("spans", Object.keys(SPANS), span, (key) => { span = key; keep("span", key); dress(); });
    if (last) show(last);
    if (last) draw();
  }

  byId("language").addEventListener("click", () => { language = language === "en" ? "zh" : "en"; keep("language", language); dress(); });
  byId("theme").addEventListener("click", () => { theme = theme === "dark" ? "light" : "dark"; keep("theme", theme); dress(); });
  byId("curious").addEventListener("change", listen);
  addEventListener("resize", draw);
  addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
  if (!(metric in METRICS)) metric = "utilization";
  if (!(span in SPANS)) span = "ten";
  if (!SORTS.includes(sort)) sort = "index";
  dress();
  listen();
})();
