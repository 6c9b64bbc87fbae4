"use strict";
// The page of an incident: sentences, curves around it, what was done, evidence, how to go on.

const SIGNALS = 6; // charts
const BOOKKEEPING = ["sha256", "files", "missing", "ack_step", "pid", "attempt", "resumed", "how", "returncode", "bytes", "ranks"];
const FAMILY = { step_time: ["forward_time", "backward_time", "optimizer_time", "tokens_per_sec"] }; // looked at together

async function incidentPage() {
  crumbs(h("a", { href: `${UP}${runPath(RUN)}/` }, RUN), h("b", {}, INCIDENT));
  document.title = `${INCIDENT} of ${RUN} · supervise`;
  const [report, run] = await Promise.all([json(`${runPath(RUN)}/incident/${INCIDENT}`), facts(RUN)]);
  const charts = h("div");
  MAIN.replaceChildren(incidentHead(report, run), sentences(report), charts, ...incidentParts(report));
  MAIN.dataset.ready = "facts";
  const evidence = await json(`${runPath(RUN)}/incident/${INCIDENT}/evidence`);
  $("#evidence").replaceWith(bundles(evidence, report));
  if (report.series) await signals(report, run, charts);
  if (report.final) return;
  let newest = null; // record of this incident
  const take = (decisions = []) => {
    const record = Math.max(-1, ...decisions.filter((d) => d.incident === INCIDENT).map((d) => d.record));
    if (newest !== null && record > newest) location.reload();
    newest ??= record;
  };
  listen(RUN, { head() {}, status: ({ decisions }) => decisions && take(decisions), record: (decision) => take([decision]) });
}

async function signals(report, run, place) {
  const { window: [from, to], signals: known } = report.series;
  const margin = Math.max(10, (to - from) * 0.05);
  const view = new View([RUN], { window: windowShown() || [from - margin, to + margin], axis: "step", smooth: 0,
    rank: String(report.series.rank) });
  const about = await metrics(RUN);
  share(view, run);
  view.ranks = Object.keys(run.frames);
  view.incidents = run.incidents.filter((incident) => incident.id === INCIDENT);
  const { onset, moves, band } = report.what;
  const [{ rules = [] } = {}] = view.incidents;
  const first = run.rules.find((rule) => rule.id === rules[0]);
  const loss = report.loss?.metric;
  const isLoss = moves.some((move) => move.metric === loss);
  const moved = moves.map((move) => move.metric);
  const judged = (first?.metrics || []).filter((name) => moved.includes(name) || name === onset?.metric);
  const names = [...new Set([isLoss && loss, ...judged, onset?.metric, ...FAMILY[onset?.metric] || [],
    ...report.conditions.filter((c) => c.breach).map((c) => c.metric), ...moved, ...first?.metrics || [], loss, ...Object.keys(known)])].filter((name) => about[name]).slice(0, SIGNALS);
  view.lines = [onset?.metric && { attempt: report.opened.attempt, step: onset.step, tone: "red", dash: [2, 2], text: `begins, step ${onset.step}`, isLeft: true },
    { ...report.opened, tone: "fg", dash: [], text: `noticed, step ${report.opened.step}` },
    ...view.lines.filter((line) => line.incident === INCIDENT)].filter(Boolean);
  view.show(names.map((name, i) => new Chart(view, name, about[name], { wide: i === 0, limit: name === loss ? band?.limit : null })));
  const steps = h("div");
  place.replaceChildren(legend(view), h("section", { class: "grid", "aria-label": "signals" }, view.charts.map((chart) => chart.element)), steps);
  keys(view);
  await view.load();
  steps.replaceWith(stepTable(report, run, view, names.slice(0, innerWidth < 600 ? 3 : 5), about));
}

// Steps around the incident: a value is that of the step, or of the newest before it that was sampled;
// of buckets those that end there or before: a mean over more has the trouble in it.
function stepTable(report, run, view, names, about) {
  const { onset, moves } = report.what;
  const { attempt } = report.opened;
  const peak = names.map((name) => moves.find((move) => move.metric === name)).find(Boolean);
  const began = onset?.metric ? onset.step : report.opened.step + 1; // what ends the job is not a step
  const again = view.lines.filter((line) => line.kind).map((line) => [line.kind, run.attempts.find((a) => a.attempt > line.attempt)]);
  const end = report.closed || report.updated;
  const rows = [["before", began - 1, attempt, true], onset?.metric && ["first bad", began, attempt], peak && peak.peak_step > began && ["peak", peak.peak_step, attempt],
    ...again.map(([kind, fresh]) => fresh && [kind, fresh.first, fresh.attempt]), end.step > began && ["after", end.step, end.attempt, true]].filter(Boolean);
  const value = (name, at, attempt_, isOld) => {
    for (const { attempt: own, n, x, y, last } of view.heads?.[0]?.stretches ?? []) {
      if (own !== attempt_) continue;
      const isOver = (step, k) => (view.heads[0].bucket > 1 ? (k + 1 < n ? x[1][k + 1] - 1 : last) : step) <= at;
      let i = x[1].findLastIndex(isOver);
      while (isOld && i > 0 && y[name][3][i] === 0) i--;
      if (i >= 0 && i < n && y[name][3][i] !== 0 && (isOld || x[1][i] === at)) return number(y[name][2][i]);
    }
    return "–";
  };
  return card("Steps", "around the incident", table([["when"], ["step", "n"], ...names.map((name) => [about[name].name, "n"])],
    rows.map(([when, at, own, isOld]) => [when, number(at), ...names.map((name) => value(name, at, own, isOld))]), "steps"));
}

function incidentHead(report, run) {
  const { opened, closed } = report;
  const where = [`${report.id} of run ${report.run.id}`, `step ${opened.step}${closed ? ` to ${closed.step}` : ""}`,
    opened.wall.slice(0, 19).replace("T", " ") + " UTC", `host ${report.run.host}`,
    run.ranks.length < 2 || report.scope.rank == null ? "" : `seen at rank ${report.scope.rank} of ${run.ranks.length}`];
  return h("div", { class: "head" },
    h("p", { class: "tags" }, severity(report.severity), " ", chip(report.state, stateTone(report.state)), " ",
      h("span", { class: "sub" }, report.state_means)),
    h("h1", { title: report.title }, run.incidents.find((i) => i.id === report.id)?.title || report.title), h("p", { class: "sub" }, where.filter(Boolean).join(" · ")));
}

const stateTone = (state) => {
  if (["RECOVERED", "CLEARED", "WITHDRAWN", "RELEASED"].includes(state)) return "good";
  return ["OPEN", "ACTING", "WATCHING", "WAITING"].includes(state) ? "busy" : "bad";
};

function sentences(report) {
  const rows = [["What", report.what], ["Cause", report.cause], ["Did", report.did], ["Cost", report.cost],
    ["Proof", report.proof], ["Next", report.next]].filter(([, part]) => part?.text);
  return h("section", { class: "card", "aria-label": "summary" }, pairs(rows.map(([name, part]) => [name, name === "Next" ? withCommands(part.text) : part.text])));
}

function incidentParts(report) {
  const action = (a) => [number(a.step), [h("b", {}, words(a.verb)), ` ${values(a.args)}`],
    [chip(a.outcome || "under way", a.ok === false ? "bad" : a.ok ? "good" : "busy"), a.took_s == null ? "" : ` in ${duration(a.took_s)} `,
      h("small", {}, values(a.result, BOOKKEEPING))]];
  const diagnosis = report.diagnosis && card("Diagnosis", "", h("p", {}, h("b", {}, report.diagnosis.class)),
    h("ul", { class: "list" }, Object.entries(report.diagnosis.questions).map(([name, q]) =>
      h("li", {}, `${words(name)}: `, h("b", {}, q.answer), `, ${q.text}`))));
  const errors = report.failures.slice(0, 2).map((failure) => card("Error", `rank ${failure.rank}`, h("p", {}, failure.text),
    failure.traceback && [h("pre", { tabindex: 0 }, failure.traceback.trim()), h("p", { class: "sub" }, failure.then)]));
  const moment = (m) => [`${m.since_s >= 0 ? "+" : ""}${m.since_s.toFixed(1)} s`, number(m.step), m.kind, m.text];
  return [
    report.actions.length > 0 && card("Actions", "", table([["step", "n"], ["action"], ["outcome"]], report.actions.map(action))),
    diagnosis,
    ...errors,
    card("Go on", "", Object.values(report.replay).filter(Boolean).map(command), h("p", { class: "sub" }, "The job was started by"),
      command(report.run.command.map(quoted).join(" "))),
    card("Evidence", "", h("div", { id: "evidence" }, report.evidence.bundles.length ? "" : "none")),
    folded("Conditions", `${report.conditions.length} conditions of its rules`, report.conditions.length &&
      table([["detector"], ["value", "n"], ["limit", "n"], ["metric"]], report.conditions.map((c) =>
        [c.detector, number(c.measured ?? c.value), number(c.limit), words(c.metric || "–")]))),
    folded("Rules", plural(report.rules.length, "rule"), report.rules.length && table([["step", "n"], ["rule"], ["when"]], report.rules.map((r) =>
      [number(r.step), [severity(r.severity), ` ${r.rule}`], [h("code", {}, r.when), h("small", {}, r.where)]]))),
    folded("Timeline", `${report.timeline.length} records`, table([["since", "n"], ["step", "n"], ["kind"], ["text"]], report.timeline.map(moment))),
  ].filter(Boolean);
}

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`);

function values(fields, without = []) {
  const isPlain = (value) => (Array.isArray(value) ? value.length > 0 && value.every(isPlain) : value != null && typeof value !== "object");
  return Object.entries(fields || {}).filter(([name, value]) => isPlain(value) && !without.includes(name))
    .map(([name, value]) => `${words(name)} ${Array.isArray(value) ? value.map(number).join(" ") : number(value)}`).join(", ");
}

function folded(title, summary, content) {
  return content && card(title, "", h("details", {}, h("summary", {}, summary), h("div", { class: "scroll", tabindex: 0, role: "group",
    "aria-label": title }, content)));
}

function bundles({ bundles: all }, report) {
  if (!all.length) return h("p", { class: "sub" }, "No evidence was collected.");
  const size = (bytes) => (bytes < 1e4 ? `${bytes} B` : bytes < 1e6 ? `${Math.round(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);
  return h("div", {}, all.map((bundle) => h("div", {},
    h("p", {}, h("b", {}, bundle.name), " ", chip(bundle.state, bundle.state === "good" ? "good" : "bad"),
      h("small", {}, ` sha256 ${bundle.sha256.slice(0, 16)}…`)),
    h("ul", { class: "files" }, bundle.files.map((file) => h("li", {},
      h("a", { href: `evidence/${bundle.name}/${encodeURIComponent(file.name)}`, download: file.name }, file.name), h("small", {}, ` ${size(file.bytes)}`)))),
    bundle.withheld.length > 0 && h("p", { class: "sub" }, `not offered here: ${bundle.withheld.map((w) => `${w.name} (${w.text})`).join(", ")}`))),
  h("p", { class: "sub" }, "Directory: ", h("code", {}, report.evidence.directory)));
}

// Incidents of a saved page, which has no other pages.
function frozenIncidents() {
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target?.matches("details")) target.open = true;
  });
  return h("div", { class: "saved" }, Object.entries(FROZEN.incidents).map(([id, report]) => h("details", { class: "card", id },
    h("summary", {}, `${id} ${report.title}`), incidentHead(report, FROZEN.run), sentences(report), ...incidentParts(report))));
}
