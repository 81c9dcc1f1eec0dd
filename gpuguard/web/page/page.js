"use strict";
// Shows each frame of the stream.  What of it is shown is in the address: #gpu=3&user=ada&metric=memory&span=hour, and
// from and until for a time that is over; so each view has a link, and a choice is a link, too.
(() => {
  const SORTS = ["index", "memory", "utilization", "temperature"];
  const FEW_EVENTS = matchMedia("(max-width: 640px)").matches ? 5 : 10, MAX_ALERTS = 12, MAX_COMMAND = 64, MAX_FACT = 40, HOURS = 7 * 24;
  const BAD = ["unhealthy", "quarantined", "unclaimed_use"];
  const kept = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
  const keep = (name, value) => { try { localStorage.setItem(name, value); } catch { /* private window */ } };
  const darkness = matchMedia("(prefers-color-scheme: dark)");

  let language = kept("language") ?? ((navigator.language || "en").startsWith("zh") ? "zh" : "en");
  let theme = kept("theme");  // null: as the system is
  let view = viewOf(location.hash);
  let last = null, stream = null, plot = null, drawn = null, asked = 0, recent = null, week = null, allEvents = false;

  // The address.
  function viewOf(hash) {
    const given = new URLSearchParams(hash.slice(1)), among = (name, keys) => (keys.includes(given.get(name)) ? given.get(name) : keys[0]);
    const moment = (name) => { const at = Date.parse(given.get(name) ?? ""); return Number.isNaN(at) ? null : at / 1000; };
    const [from, until] = [moment("from"), moment("until")], isPeriod = from !== null && until !== null && from < until;
    return {
      gpu: given.get("gpu"), user: given.get("user"), sort: among("sort", SORTS), metric: among("metric", Object.keys(METRICS)),
      span: among("span", ["ten", ...Object.keys(SPANS)]), from: isPeriod ? from : null, until: isPeriod ? until : null,
    };
  }
  function address(changes) {
    const next = { ...view, ...changes }, written = new URLSearchParams();
    const usual = { sort: SORTS[0], metric: "utilization", span: "ten" };
    for (const [name, value] of Object.entries(next)) {
      if (value === null || value === usual[name]) continue;
      written.set(name, typeof value === "number" ? new Date(value * 1000).toISOString().replace(".000Z", "Z") : value);
    }
    return `#${written}`;
  }
  const link = (changes, text, properties = {}) => make("a", { href: address(changes), ...properties }, text);
  function period() {
    if (view.until) return [view.from, view.until];
    const now = Date.now() / 1000;
    return [now - SPANS[view.span], now];
  }

  // Words.
  const found = (key) => WORDS[language][key] ?? WORDS.en[key] ?? key;
  const word = (key, ...values) => values.reduce((text, value) => text.replace("{}", () => value), found(key));
  const named = (name) => found("log")[name] ?? name.replaceAll("_", " ");
  const size = (bytes) => UNITS.bytes(bytes) ?? word("unknown");
  const rate = (bytes) => UNITS.rate(bytes) ?? word("unknown");
  const time = (seconds) => UNITS.duration(seconds, found("durations")) ?? word("unknown");
  const number = (value, unit) => UNITS.rounded(value, unit) ?? word("unknown");
  const clock = (at, how) => UNITS.clock(at, language, how);
  const day = (at) => UNITS.day(at, language);
  const moment = (at) => `${Math.abs(at - Date.now() / 1000) > 72000 ? `${day(at)} ` : ""}${clock(at, { seconds: false })}`;
  const state = (name) => word(name === "unknown" ? "unknown_state" : name);
  const userLink = (user) => (user ? link({ user }, user, { class: "user" }) : make("span", { class: "user" }, word("unknown")));
  const deviceName = (device) => word("device_named", device.label);
  // A sentence of a frame in the reader's language; a text that is none stays as it is.
  const phrase = (text, { chinese } = last) => (language === "zh" && Object.hasOwn(chinese, text) ? chinese[text] : text);

  // Whether a device or a row is among what the address asks for.
  const isDevice = (device) => !view.gpu || device.label === view.gpu || (view.gpu.length > 7 && device.uuid.startsWith(view.gpu));
  const isShown = (device) => isDevice(device)
    && (!view.user || [...device.claims, ...(device.processes ?? [])].some((held) => held.user === view.user));
  const isOfUser = (row) => !view.user || row.user === view.user;

  function command(words, key) {
    const whole = (words ?? []).join(" ");
    if (!whole) return null;
    const brief = words.map((text, place) => (place < 2 ? text.replace(/^\/.*\/(?=.)/, "") : text)).join(" ");
    if (brief === whole && whole.length <= MAX_COMMAND) return make("code", { class: "command" }, whole);
    const short = brief.length > MAX_COMMAND ? `${brief.slice(0, MAX_COMMAND - 1)}…` : brief;
    return make("details", { "data-key": key }, make("summary", { title: whole }, make("code", { class: "command" }, short)), make("code", {}, whole));
  }

  // The overview and what needs attention.
  function showOverview(seen) {
    const usable = seen.devices.filter((device) => device.exact_state !== "divided");
    const count = (name) => usable.filter((device) => device.exact_state === name).length;
    const starts = seen.line.map((job) => job.expected_start).filter((at) => at > seen.taken_at + 30);
    const waiting = seen.line.length ? word("waiting_some", seen.line.length) : word("waiting_none");
    const next = starts.length ? word("next_start", moment(Math.min(...starts))) : "";
    const free = word("summary", count("free") + count("asleep"), usable.length);
    document.title = `${free} · ${seen.host}`;
    renew(byId("summary"), [free, waiting, next].filter(Boolean).join(language === "zh" ? "，" : ", "));
    const names = [...new Set(usable.map((device) => device.exact_state))].filter((name) => name !== "free");
    renew(byId("counts"), names.map((name) => make("li", { class: `state ${name}` }, `${count(name)} ${state(name)}`)));
    const only = [view.gpu && word("device_named", view.gpu), view.user, view.until && word("from_until", moment(view.from), moment(view.until))];
    byId("filter").hidden = !only.some(Boolean);
    renew(byId("filter"), word("only", only.filter(Boolean).join(" · ")), " · ", link({ gpu: null, user: null, from: null, until: null }, word("show_all")));
  }
  function showAlerts(seen) {
    const rows = seen.devices.filter((device) => BAD.includes(device.exact_state)).map((device) => {
      const why = device.reason && phrase(device.reason), tellsState = why && device.exact_state === "quarantined";  // by whom
      return make("li", {}, link({ gpu: device.label }, deviceName(device)), " ",
        make("b", { class: `state ${device.exact_state}` }, tellsState ? why : state(device.exact_state)), why && !tellsState ? `: ${why}` : "");
    });
    for (const finding of seen.findings) {
      const about = [finding.user, finding.pid && word("process", finding.pid), finding.claim && word("claim_named", finding.claim),
        finding.device_label && word("device_named", finding.device_label)].filter(Boolean).join(", ");
      const next = finding.refused ? word("finding_refused", named(finding.next ?? finding.last ?? ""), phrase(finding.refused))
        : finding.next && finding.next_unix_seconds ? word("finding_next", named(finding.next), clock(finding.next_unix_seconds)) : "";
      rows.push(make("li", {}, [word("finding", finding.policy, about || word("all_of_it"), clock(finding.since_unix_seconds, { seconds: false })),
        next, finding.enforce ? "" : word("dry")].filter(Boolean).join(" · ")));
    }
    byId("alerts").hidden = !rows.length;
    const more = Math.max(0, rows.length - MAX_ALERTS) + seen.findings_left_out;
    renew(byId("alert-list"), rows.slice(0, MAX_ALERTS), more > 0 && make("li", {}, word("more", more)));
  }

  // Cards.
  function meter(name, share, text, warn, bad) {
    const level = share >= bad ? "bad" : share >= warn ? "warn" : null;
    const fill = make("i", { class: level, style: { width: `${Math.max(0, Math.min(100, share ?? 0))}%` } });
    return make("div", { class: "meter" }, make("span", {}, name), make("span", {}, text), make("div", { "aria-hidden": "true" }, fill));
  }
  function remaining(claim, now) {
    const end = claim.ends ?? claim.expected;
    if (UNITS.isUnknown(end)) return "";
    if (end <= now) return claim.ends ? word("over") : "";  // what earlier jobs took is only a guess
    return word(claim.ends ? "left" : "left_about", time(Math.round(end - now)));
  }
  function claimRow(claim, device, seen) {
    const facts = [word("since", time(claim.since && Math.round(seen.taken_at - claim.since))), remaining(claim, seen.taken_at),
      claim.memory_bytes && word("shared", size(claim.memory_bytes)), claim.idle && word("idle_claim"),
      claim.orphaned && word("orphaned"), claim.stopped && word("stopped"), claim.note];
    return make("li", {}, userLink(claim.user), ` ${facts.filter(Boolean).join(" · ")}`, command(claim.command, `${device.uuid}${claim.id}`));
  }
  function processRow(process, device) {
    const strange = !process.claim && process.computes !== false;
    const facts = [word("process", process.pid), size(process.memory_used_bytes), strange && word("no_claim"), process.stopped && word("stopped")];
    return make("li", {}, userLink(process.user), ` ${facts.filter(Boolean).join(" · ")}`,
      command(process.command ?? (process.executable ? [process.executable] : []), `${device.uuid}${process.pid}`));
  }
  function people(device, seen) {
    const claims = device.claims.map((claim) => claimRow(claim, device, seen)), processes = device.processes ?? [];
    const strange = processes.filter((process) => !process.claim && process.computes !== false);
    const others = processes.filter((process) => !strange.includes(process));
    const known = others.every((process) => !UNITS.isUnknown(process.memory_used_bytes));
    const memory = size(known ? others.reduce((sum, process) => sum + process.memory_used_bytes, 0) : null);
    const summary = others.length === 1 ? word("process_of", memory) : word("processes_of", others.length, memory);
    const list = make("ul", { class: "who" }, claims, strange.slice(0, 8).map((process) => processRow(process, device)));
    return [list.childNodes.length > 0 && list, others.length > 0 && make("details", { "data-key": `${device.uuid}others` },
      make("summary", {}, summary), make("ul", { class: "who" }, others.map((process) => processRow(process, device))))];
  }
  function spark(device, now) {
    if (!recent?.values[device.uuid]) return null;
    const { seconds, parts } = CHARTS.SPARK, values = CHARTS.parts(recent.times, recent.values[device.uuid], now - seconds, seconds, parts);
    const known = values.filter((value) => value !== null);
    if (!known.length) return null;
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    return CHARTS.spark(values, word("spark", number(mean, "%"), number(Math.max(...known), "%")));
  }
  function card(device, seen) {
    const name = `card-${device.uuid}`, exact = device.exact_state;
    const used = device.memory_used_bytes, full = used != null && device.memory_total_bytes ? 100 * used / device.memory_total_bytes : null;
    const heat = device.temperature_celsius, watts = device.power_draw_watts, limit = device.power_limit_watts;
    const model = [seen.models[device.uuid] ?? word("unknown"), !UNITS.isUnknown(heat) && number(heat, "\u00a0°C"),
      !UNITS.isUnknown(watts) && (limit ? word("watts", number(watts, ""), number(limit, "\u00a0W")) : number(watts, "\u00a0W"))];
    const flow = seen.throughput && seen.throughput[device.uuid];
    return make("article", { class: `card ${exact}`, "data-key": device.uuid, "aria-labelledby": name },
      make("h3", { id: name }, link({ gpu: device.label }, deviceName(device)), " ", make("span", { class: `state ${exact}` }, state(exact))),
      make("p", { class: heat >= 88 ? "model hot" : "model", title: device.uuid }, model.filter(Boolean).join(" · ")),
      exact !== "divided" && [
        meter(device.memory_shared_with_host ? word("host_memory") : word("memory"), full, word("meter", size(used), size(device.memory_total_bytes)), 90, 98),
        meter(word("utilization"), device.utilization_percent, number(device.utilization_percent, "%"), 101, 101),
        spark(device, seen.taken_at)],
      flow && make("p", { class: "flow" }, word("pcie", rate(flow.received), rate(flow.sent))),
      flow && flow.nvlink_received != null && make("p", { class: "flow" }, word("nvlink", rate(flow.nvlink_received), rate(flow.nvlink_sent))),
      device.reason && make("p", { class: "reason" }, phrase(device.reason)),
      device.slots_left != null && make("p", { class: "flow" }, word("share_left", size(device.share_left_bytes), device.slots_left)),
      people(device, seen));
  }

  function showCards(seen) {
    const field = METRICS[view.sort]?.field, shown = seen.devices.filter(isShown);
    if (field) shown.sort((left, right) => (right[field] ?? -1) - (left[field] ?? -1));
    byId("nothing").hidden = seen.devices.length > 0;
    renew(byId("cards"), shown.map((device) => card(device, seen)));
  }

  // Tables.
  const heads = (...keys) => keys.map((key) => ({ text: word(key.split(" ")[0]), [key.split(" ")[1]]: true }));
  function showTables(seen) {
    const waiting = seen.line.filter(isOfUser);
    byId("queue").hidden = !seen.line.length;
    renewTable("queue-table", heads("place number", "user", "gpus number", "waited number", "start wide", "job wide"), waiting.map((job) => [
      String(job.number), userLink(job.user), String(job.num_gpus), time(Math.round(job.waited_seconds)), start(job),
      [job.note, job.note && job.command?.length ? " " : "", command(job.command, `job${job.id}`)]]));
    renewTable("users-table", heads("user", "gpus number", "processes number", "memory number", "claimed_count number", "idle_count number"),
      seen.users.filter(isOfUser).map((row) => [userLink(row.user), row.devices, row.processes, size(row.memory_used_bytes), row.claimed, row.idle].map((cell) => (typeof cell === "number" ? String(cell) : cell))));
    const labels = seen.devices.filter(isDevice).map((device) => device.label), [from, until] = period();
    const events = [...seen.events].reverse().filter((event) => isOfUser(event)
      && (!view.gpu || event.devices.some((label) => labels.includes(label))) && (!view.until || (event.time >= from && event.time <= until)));
    renewTable("events-table", heads("time", "gpu number", "user", "what", "note wide"), (allEvents ? events : events.slice(0, FEW_EVENTS)).map((event) => [
      `${day(event.time)} ${clock(event.time)}`, event.devices.join(", "), event.user ? userLink(event.user) : "",
      `${named(event.kind)} ${named(event.outcome)}`, note(event)]));
    byId("events-table").hidden = !events.length;
    byId("no-events").hidden = events.length > 0;
    byId("more-events").hidden = events.length <= FEW_EVENTS;
    byId("more-events").textContent = word(allEvents ? "fewer_events" : "all_events");
  }
  function showJobs(seen) {
    const labels = (job) => seen.devices.filter((device) => isDevice(device) && job.devices.includes(device.uuid)).map((device) => device.label);
    const jobs = seen.jobs.filter((job) => isOfUser(job) && (!view.gpu || labels(job).length));
    byId("jobs").hidden = !jobs.length;
    renewTable("jobs-table", heads("job", "job_state", "gpus number", "lasted number", "command wide"), jobs.map((job) => [
      [userLink(job.user), job.id.slice(job.user.length)],
      job.state === "running" ? word("runs_now") : job.num_tasks === 1 ? word("task_waits") : word("tasks_wait", job.num_tasks),
      labels(job).length ? word("device_named", labels(job).join(", ")) : String(job.num_gpus),
      time(job.since_unix_seconds && Math.max(0, Math.round(seen.taken_at - job.since_unix_seconds))),
      [command(job.what.split(" "), `what${job.id}`), job.unattended && make("span", { class: "reason unclaimed_use" }, word("unattended"))]]));
  }
  function start(job) {
    if (job.starts_now) return word("now");
    const why = job.reason && make("span", { class: "dim" }, phrase(job.reason));
    return [make("b", {}, job.expected_start ? word("about", moment(job.expected_start)) : word("start_unknown")), " ", why];
  }
  function note(event) {
    const facts = event.facts.map(([name, value]) => {
      const [bare, text] = UNITS.fact(name, value, language, found("durations"));
      if (bare === "harm_action") return `${named(bare)} ${named(text)}`;
      const told = phrase(text);
      return `${named(bare)} ${told.length > MAX_FACT ? `${told.slice(0, MAX_FACT)}…` : told}`;
    });
    return [phrase(event.message).replace(/(?<!\.)[.。]$/, ""), facts.join(language === "zh" ? "，" : ", ")].filter(Boolean).join(language === "zh" ? "；" : "; ");
  }
  function showHost(seen) {
    const use = seen.host_use;
    renew(byId("host-use"), [word("cpu", number(use.cpu_percent, "%"), use.cpu_count ?? word("unknown")),
      word("ram", size(use.memory_used_bytes), size(use.memory_total_bytes)),
      word("disk", rate(use.disk_read_bytes_per_second), rate(use.disk_write_bytes_per_second)),
      word("net", rate(use.network_received_bytes_per_second), rate(use.network_sent_bytes_per_second))].join(" · "));
    byId("gaps").hidden = !seen.unknown.length;
    renew(byId("gap-list"), seen.unknown.slice(0, 40).map((text) => make("li", {}, phrase(text))));
  }

  function show(seen) {
    if (seen.error) { status(phrase(seen.error, seen), true); return; }
    const first = !last;
    last = seen;
    status(word("live"), false);
    renew(byId("title"), `gpuguard · ${seen.host}${seen.simulated ? ` · ${word("simulated")}` : ""}`);
    renew(byId("age"), seen.age_seconds === null ? "" : `· ${word("seen", time(Math.round(seen.age_seconds)))}`);
    showOverview(seen);
    showAlerts(seen);
    showCards(seen);
    showTables(seen);
    showJobs(seen);
    showHost(seen);
    if (first) redraw(); else extend(seen);
  }
  function status(text, bad) {
    if (byId("status").textContent !== text) byId("status").textContent = text;  // else it is read aloud again
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

  // Charts: each is asked for whole; between two times the stream brings the new points (extend).
  async function redraw() {
    asked = Date.now();
    try {
      [recent, week] = await Promise.all([CHARTS.fetched("utilization", CHARTS.SPARK.seconds), CHARTS.fetched("utilization", HOURS * 3600, { step: 3600 })]);
    } catch { return; }
    showWeek();
    if (last) showCards(last);
    await draw();
  }
  async function draw() {
    const wanted = location.hash, [begin, end] = period(), { metric } = view;
    let chart;
    try { chart = await CHARTS.fetched(metric, end - begin, { until: view.until }); } catch { return; }
    if (wanted !== location.hash || !last) return;
    const shown = last.devices.filter((device) => isShown(device) && chart.values[device.uuid]);
    const rows = [chart.times, ...shown.map((device) => chart.values[device.uuid].map(scaled))];
    const look = [wanted, theme, darkness.matches, language, byId("chart").clientWidth, ...shown.map((device) => device.label)].join("|");
    if (plot && drawn.look === look) { drawn.rows = rows; plot.setData(rows); } else {
      if (plot) plot.destroy();
      drawn = { look, uuids: shown.map((device) => device.uuid), rows };
      const lines = shown.map((device, place) => ({ name: deviceName(device), colour: CHARTS.colour(place, shown.length) }));
      plot = new uPlot(CHARTS.options({ width: Math.max(200, byId("chart").clientWidth - 18), lines, metric, period, language,
        timeWord: word("time"), zoom: (from, until) => { location.hash = address({ from: Math.floor(from), until: Math.ceil(until) }); } }), rows, byId("chart"));
    }
    const newest = (row) => row.findLast((value) => value !== null);
    const values = shown.map((device, place) => word("chart_value", deviceName(device), number(newest(rows[place + 1]), METRICS[metric].unit)));
    const canvas = byId("chart").querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", word("chart", word(metric), word("from_until", moment(begin), moment(end)), values.join(", ")));
  }
  const scaled = (value) => (UNITS.isUnknown(value) ? null : value / METRICS[view.metric].divisor);
  function extend(seen) {
    if (document.hidden || !recent) return;
    const uuids = Object.keys(recent.values);
    if (seen.devices.length !== uuids.length || Date.now() - asked > 300000) { redraw(); return; }
    append(recent.times, uuids.map((uuid) => recent.values[uuid]), seen, "utilization", uuids, CHARTS.SPARK.seconds);
    if (!plot || view.until) return;
    const seconds = SPANS[view.span], [times, ...rows] = drawn.rows;
    if (seconds > 600) { if (Date.now() - (drawn.asked ?? asked) > 30000) { drawn.asked = Date.now(); draw(); } return; }
    append(times, rows, seen, view.metric, drawn.uuids, seconds, METRICS[view.metric].divisor);
    plot.setData(drawn.rows);
  }
  function append(times, rows, seen, metric, uuids, seconds, divisor = 1) {
    if (times.length && seen.taken_at <= times[times.length - 1]) return;
    const old = Math.max(0, times.findIndex((at) => at >= seen.taken_at - seconds)), devices = new Map(seen.devices.map((device) => [device.uuid, device]));
    times.splice(0, old);
    times.push(seen.taken_at);
    rows.forEach((row, place) => {
      const value = devices.get(uuids[place])?.[METRICS[metric].field];
      row.splice(0, old);
      row.push(UNITS.isUnknown(value) ? null : value / divisor);
    });
  }

  // The week: a row of hours for each device.
  function showWeek() {
    if (!week || !last) return;
    const begin = week.begin, hour = (at) => begin + at * 3600;
    const rows = last.devices.filter((device) => isShown(device) && week.values[device.uuid]).map((device) => ({
      device, values: CHARTS.parts(week.times, week.values[device.uuid], begin, HOURS * 3600, HOURS) }));
    byId("no-week").hidden = rows.some(({ values }) => values.some((value) => value !== null));
    byId("week-rows").hidden = !byId("no-week").hidden;
    const midnights = [...Array(HOURS).keys()].filter((at) => new Date(hour(at) * 1000).getHours() === 0);
    const days = midnights.map((at) => make("span", { style: { left: `${100 * at / HOURS}%` } }, UNITS.weekday(hour(at), language)));
    renew(byId("week-rows"), make("li", { class: "days", "aria-hidden": "true" }, make("div", {}, days)), rows.map(({ device, values }) => {
      const known = values.filter((value) => value !== null), most = Math.max(...known), at = values.indexOf(most);
      const mean = known.length ? number(known.reduce((sum, value) => sum + value, 0) / known.length, "%") : word("no_samples");
      const when = `${UNITS.weekday(hour(at), language)} ${clock(hour(at), { seconds: false })}`;
      return make("li", { "data-key": device.uuid }, link({ gpu: device.label }, deviceName(device)),
        make("canvas", { role: "img", "aria-label": known.length ? word("week_row", deviceName(device), mean, number(most, "%"), when) : word("no_samples") }),
        make("span", {}, known.length ? word("mean", mean) : mean));
    }));
    rows.forEach(({ values }, place) => CHARTS.strip(byId("week-rows").children[place + 1].querySelector("canvas"), values));
    weekCells = rows;
  }
  let weekCells = [];
  function weekCell(event) {
    const canvas = event.target.closest("canvas");
    if (!canvas) return null;
    const place = [...byId("week-rows").children].indexOf(canvas.parentNode) - 1, box = canvas.getBoundingClientRect();
    const at = Math.min(HOURS - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * HOURS)));
    return { ...weekCells[place], canvas, at, from: week.begin + at * 3600 };
  }
  byId("week-rows").addEventListener("mousemove", (event) => {
    const cell = weekCell(event);
    if (cell) cell.canvas.title = `${UNITS.weekday(cell.from, language)} ${clock(cell.from, { seconds: false })}: ${number(cell.values[cell.at], "%")}`;
  });
  byId("week-rows").addEventListener("click", (event) => {
    const cell = weekCell(event);
    if (cell) location.hash = address({ gpu: cell.device.label, from: cell.from, until: cell.from + 3600 });
  });

  // What does not come from the stream.
  function choices(id, name, keys) {
    renew(byId(id), keys.map((key) => link({ [name]: key, ...(name === "span" ? { from: null, until: null } : {}) }, word(key),
      { "aria-current": view[name] === key && !(name === "span" && view.until) ? "true" : null })));
  }
  function dress() {
    document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
    document.documentElement.dataset.theme = theme ?? (darkness.matches ? "dark" : "light");
    for (const node of document.querySelectorAll("[data-word]")) node.textContent = word(node.dataset.word);
    for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", word(node.dataset.label));
    byId("language").textContent = word("language");
    byId("language").lang = language === "zh" ? "en" : "zh-CN";
    byId("theme").textContent = word(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    choices("sorts", "sort", SORTS);
    choices("metrics", "metric", Object.keys(METRICS));
    choices("spans", "span", Object.keys(SPANS));
    byId("live").hidden = !view.until;
    byId("live").setAttribute("href", address({ from: null, until: null }));
    const local = view.until && new Date((view.until - new Date().getTimezoneOffset() * 60) * 1000);
    byId("until").value = local ? local.toISOString().slice(0, 16) : "";
    if (last) { show(last); showWeek(); draw(); }
  }

  byId("language").addEventListener("click", () => { language = language === "en" ? "zh" : "en"; keep("language", language); dress(); });
  byId("theme").addEventListener("click", () => { theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; keep("theme", theme); dress(); });
  byId("curious").addEventListener("change", listen);
  byId("more-events").addEventListener("click", () => { allEvents = !allEvents; showTables(last); });
  byId("until").addEventListener("change", (event) => {
    const until = Date.parse(event.target.value) / 1000;
    location.hash = address(Number.isNaN(until) ? { from: null, until: null } : { until, from: until - SPANS[view.span] });
  });
  darkness.addEventListener("change", dress);
  addEventListener("hashchange", () => { view = viewOf(location.hash); dress(); });
  addEventListener("resize", draw);
  addEventListener("visibilitychange", () => { if (!document.hidden) redraw(); });
  dress();
  listen();
})();
