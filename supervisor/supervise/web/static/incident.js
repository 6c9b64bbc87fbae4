"use strict";
// The page of an incident: sentences, curves around it, what was done, evidence, how to go on.

const SIGNALS = 6; // charts
const NEAR = 30; // steps shown before what began, and after its end
const [LATE, HEALTHY, FEWEST] = [32, 8, 4]; // steps just before, the newest samples in them, and how many say what was healthy
const READ_MS = 5000; // between two looks at an incident that is open
const LONGEST = 300; // steps shown of an incident: in more of them its beginning would be a line
const OWN_TIMES = ["other_time", "input_time", "forward_time"]; // in which ranks differ: in a backward they wait
const FAMILY = { step_time: ["forward_time", "backward_time", "optimizer_time", "tokens_per_sec"] }; // looked at together

async function incidentPage() {
  crumbs(h("a", { href: `${UP}${runPath(RUN)}/` }, RUN), h("b", {}, INCIDENT));
  document.title = `${INCIDENT} of ${RUN} · supervise`;
  const path = `${runPath(RUN)}/incident/${INCIDENT}`;
  const [report, run] = await Promise.all([json(path), facts(RUN)]);
  const shows = { report };
  const sections = new Sections(shows);
  const place = h("div");
  MAIN.replaceChildren(sections.add((now) => h("div", {}, incidentHead(now.report), sentences(now.report))), place,
    sections.add((now) => h("div", {}, incidentParts(now.report))));
  MAIN.dataset.ready = "facts";
  let draw = report.series && await signals(report, run, place);
  if (report.final) return;
  let [isOld, waits] = [false, null];
  const read = async () => {
    waits = null;
    if (isOld) shows.report = await json(path);
    if (isOld) sections.update(shows);
    isOld = false;
    if (draw) await draw(shows.report);
    else draw = shows.report.series && await signals(shows.report, run, place);
  };
  listen(RUN, run, ({ decisions, ...changed }) => {
    Object.assign(run, changed);
    isOld ||= decisions.some((d) => d.incident === INCIDENT);
    waits ??= setTimeout(() => read().catch(() => live("no connection")), READ_MS);
  });
}

// The charts, and the table of steps under them; returns what draws them up to the newest step.
async function signals(report, run, place) {
  const rank = String(report.series.rank);
  const view = new View([RUN], { axis: "step", smooth: 0, rank });
  Object.assign(run, await builtFacts(RUN)); // attempts and ranks are known then
  const about = run.metrics;
  view.ranks = Object.keys(run.frames);
  const { rules = [], slow_since: slow } = run.incidents.find((incident) => incident.id === INCIDENT) || {};
  const isSlow = slow != null && view.ranks.length > 1; // ranks beside each other, the slow one first
  if (isSlow) {
    const own = String(run.slow?.rank ?? rank);
    view.ranks = [own, ...view.ranks.filter((other) => other !== own)];
    view.rank = "all";
  }
  const loss = report.loss?.metric;
  const rule = run.rules.find(({ id }) => id === rules[0]);
  const names = signalNames(report, rule?.metrics || [], isSlow).filter((name) => about[name]).slice(0, SIGNALS);
  const limit = (name) => (name === loss ? report.what.band?.limit : null);
  view.show(names.map((name, i) => new Chart(view, name, about[name], { wide: i === 0, limit: limit(name) })));
  const steps = h("div");
  place.replaceChildren(legend(view), h("section", { class: "grid", "aria-label": "signals" }, view.charts.map((chart) => chart.element)), steps);
  keys(view);
  await draw(report);
  return draw;

  async function draw(now) {
    const { opened, series: { window: [from, to] }, what: { onset, moves } } = now;
    share(view, run);
    view.incidents = run.incidents.filter((incident) => incident.id === INCIDENT);
    const restored = view.lines.filter((line) => line.incident === INCIDENT);
    view.lines = [onset?.metric && { attempt: opened.attempt, step: onset.step, tone: "red", dash: [2, 2], text: `begins, step ${onset.step}` },
      { ...opened, tone: "fg", dash: [], text: `noticed, step ${opened.step}` }, ...restored].filter(Boolean);
    view.window = windowShown() || stepsAround(now, run.step);
    await view.load();
    const ranks = isSlow ? [...new Set([view.ranks[0], rank])] : [rank];
    const query = { x: "step", lo: from, hi: Math.max(to, run.step) + 1, px: 1600 };
    const heads = await Promise.all(ranks.map((of) => series(RUN, names, { ...query, rank: of })));
    const moved = [onset?.metric, ...moves.map((move) => move.metric)]; // what moved first
    const order = [...new Set([...moved, ...names])].filter((name) => names.includes(name));
    steps.replaceChildren(stepTable(now, run, restored, heads, order, about));
  }
}

// From before what began up to the end, or to the newest step of the run.
function stepsAround({ opened, closed, what: { onset }, series: { window: [from, to] } }, newest) {
  const begin = Math.max(from, Math.min(onset?.step ?? opened.step, opened.step) - NEAR);
  const end = Math.min(Math.max(to, closed?.step ?? newest) + NEAR, newest, begin + LONGEST);
  const margin = (end - begin) * 0.03;
  return [begin - margin, end + margin];
}

// Of what an incident is about, the most telling first.
function signalNames({ what: { onset, moves }, loss, conditions, series: { signals } }, judged, isSlow) {
  const moved = moves.map((move) => move.metric);
  const own = judged.filter((name) => moved.includes(name) || name === onset?.metric);
  const leads = isSlow ? [onset?.metric, ...OWN_TIMES, ...own] : [moved.includes(loss?.metric) && loss.metric, ...own, onset?.metric];
  const breached = conditions.filter((c) => c.breach).map((c) => c.metric);
  const names = new Set([...leads, ...FAMILY[onset?.metric] || [], ...breached, ...moved].filter(Boolean));
  return names.size > 1 ? [...names] : [...new Set([...names, loss?.metric, ...judged, ...Object.keys(signals)])];
}

// Steps around the incident: a value is that of the step, or of the newest before it that was sampled;
// of buckets those that end there or before: a mean over more has the trouble in it. `heads`: of ranks,
// of which the first that has a metric counts.
function stepTable(report, run, restored, heads, names, about) {
  const { onset, moves } = report.what;
  const { attempt } = report.opened;
  const peak = [report.loss?.metric, onset?.metric].filter((name) => about[name]).map((name) => moves.find((move) => move.metric === name)).find((move) => move && move.peak_step > onset.step);
  const began = onset?.metric ? onset.step : report.opened.step + 1; // what ends the job is not a step
  const again = restored.map((line) => [line, run.attempts.find((a) => a.attempt > line.attempt)]);
  const end = report.closed || report.updated;
  const healthy = Object.fromEntries(moves.map((move) => [move.metric, move.before])); // as the sentences have it
  const moments = [["before", began - 1, attempt, true], onset?.metric && ["first bad", began, attempt],
    peak && [`peak of ${about[peak.metric].name}`, peak.peak_step, attempt],
    ...again.map(([{ kind, step }, fresh]) => fresh && [`${kind}${fresh.first <= step ? `, steps ${number(fresh.first)} to ${number(step)} again` : ""}`, fresh.first, fresh.attempt]),
    end.step > began && ["after", end.step, end.attempt, true]].filter(Boolean);
  const stretches = heads.flatMap((head) => head.stretches.map((stretch) => ({ ...stretch, bucket: head.bucket })));
  const value = (name, at, attempt_, isOld) => {
    for (const { attempt: own, n, x, y, last, bucket } of stretches) {
      if (own !== attempt_) continue;
      const isOver = (step, k) => (bucket > 1 ? (k + 1 < n ? x[1][k + 1] - 1 : last) : step) <= at;
      let i = x[1].findLastIndex(isOver);
      while (isOld && i > 0 && y[name][3][i] === 0) i--;
      if (i >= 0 && i < n && y[name][3][i] !== 0 && (isOld || x[1][i] === at)) return measure(y[name][2][i], about[name].unit);
    }
    return "–";
  };
  const of = heads.length > 1 ? `, of rank ${heads[0].rank}` : "";
  // As on cards: the median of the newest samples, of which one alone may lie anywhere in the noise.
  const calm = (name, at, attempt_) => {
    const samples = ({ x, y }) => [...y[name][2]].filter((_, i) => y[name][3][i] > 0 && x[1][i] > at - LATE && x[1][i] <= at);
    const ofRank = (head) => head.stretches.filter((stretch) => stretch.attempt === attempt_).flatMap(samples);
    const values = heads.filter((head) => head.bucket === 1).map(ofRank).find((each) => each.length >= FEWEST)?.slice(-HEALTHY).sort((a, b) => a - b);
    return values && measure((values[(values.length - 1) >> 1] + values[values.length >> 1]) / 2, about[name].unit);
  };
  const before = (name, ...moment) => (name in healthy ? measure(healthy[name], about[name].unit) : calm(name, ...moment) ?? value(name, ...moment));
  return card("Steps", `around the incident${of}`, h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "steps" },
    table([["metric", "", null, ""], ...moments.map(([when, at]) => {
      const where = when === "before" ? `healthy, up to step ${number(at)}` : `step ${number(at)}`;
      return [[when, h("small", {}, ` ${where}`)], "n", null, `${when}, ${where}:`];
    })],
      names.map((name) => [about[name].name, ...moments.map(([when, ...moment]) => (when === "before" ? before : value)(name, ...moment))]), "steps stack")));
}

const measure = (value, unit) => (unit === "s" && isFinite(value) ? duration(value) : number(value));

function incidentHead(report) {
  const { opened, closed } = report;
  const where = [`${report.id} of run ${report.run.id}`, `step ${opened.step}${closed ? ` to ${closed.step}` : ""}`,
    (opened.wall || "").slice(0, 19).replace("T", " ") + " UTC", `host ${report.run.host}`];
  return h("div", { class: "head" },
    h("p", { class: "tags" }, severity(report.severity), " ", chip(report.state, stateTone(report.state)), " ",
      h("span", { class: "sub" }, report.state_means)),
    h("h1", {}, report.title), h("p", { class: "sub" }, where.join(" · ")));
}

const stateTone = (state) => {
  if (["RECOVERED", "CLEARED", "WITHDRAWN", "RELEASED"].includes(state)) return "good";
  return /^(OPEN|ACTING|WATCHING|APPROVAL PENDING|JOB FINISHED)/.test(state) ? "busy" : "bad";
};

function sentences(report) {
  const rows = [["What", report.what], ["Cause", report.cause], ["Did", report.did], ["Cost", report.cost],
    ["Proof", report.proof], ["Next", report.next]].filter(([, part]) => part?.text);
  return h("section", { class: "card", "aria-label": "summary" }, pairs(rows.map(([name, part]) => [name, name === "Next" ? advised(part.steps) : part.text])));
}

function incidentParts(report) {
  const diagnosis = report.diagnosis && card("Diagnosis of the loss", "", h("p", {}, h("b", {}, report.diagnosis.class)),
    h("ul", { class: "list" }, Object.entries(report.diagnosis.questions).map(([name, q]) =>
      h("li", {}, `${words(name)}: `, h("b", {}, q.answer), `, ${q.text}`))));
  const errors = report.failures.slice(0, 2).filter((failure) => failure.traceback).map((failure) => card("Error", `rank ${failure.rank}`,
    h("p", {}, failure.text), [h("pre", { tabindex: 0 }, failure.traceback.trim()), h("p", { class: "sub" }, failure.then), failure.command && command(failure.command)]));
  const moment = (m) => [`${m.since_s >= 0 ? "+" : ""}${m.since_s.toFixed(1)} s`, number(m.step), m.kind, m.text];
  return [
    diagnosis,
    ...errors,
    card("Go on", "", Object.values(report.replay).filter(Boolean).map(command), h("p", { class: "sub" }, "The job was started by"),
      command(report.run.command.map(quoted).join(" "))),
    report.files?.length > 0 && card("Evidence", "", bundles(report)),
    card("Details", "", folded(`${report.conditions.length} conditions of its rules`, report.conditions.length > 0 &&
      table([["detector"], ["reading"]], report.conditions.map((c) => [c.detector, c.text]))),
    folded(plural(report.rules.length, "rule"), report.rules.length > 0 && table([["step", "n"], ["rule"], ["when"]], report.rules.map((r) =>
      [number(r.step), [severity(r.severity), ` ${r.rule}`], [h("code", {}, r.when), h("small", {}, r.where)]]))),
    folded(`${report.timeline.length} records`, table([["since", "n"], ["step", "n"], ["kind"], ["text"]], report.timeline.map(moment)))),
  ].filter(Boolean);
}

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`);

const folded = (summary, content) => content && h("details", { "data-key": summary.replace(/^\d+ /, "") }, h("summary", {}, summary),
  h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": summary }, content));

function bundles(report) {
  const size = (bytes) => (bytes < 1e4 ? `${bytes} B` : bytes < 1e6 ? `${Math.round(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);
  const item = (bundle) => (file) => h("li", {},
    h("a", { href: `evidence/${bundle.name}/${encodeURIComponent(file.name)}`, download: file.name }, file.name),
    h("small", {}, ` ${size(file.bytes)}`));
  return h("div", {}, report.files.map((bundle) => h("div", {},
    h("p", {}, h("b", {}, bundle.name), " ", chip(bundle.state, bundle.state === "good" ? "good" : "bad"),
      h("small", {}, ` sha256 ${bundle.sha256.slice(0, 16)}…`)),
    h("ul", { class: "files" }, bundle.files.map(item(bundle))),
    bundle.withheld.length > 0 && h("p", { class: "sub" },
      `not offered here: ${bundle.withheld.join(", ")} (it may hold secrets: read it in the run directory)`))),
  h("p", { class: "sub" }, "Directory: ", h("code", {}, report.evidence.directory)));
}

// Incidents of a saved page, which has no other pages.
function frozenIncidents() {
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target?.matches("details")) target.open = true;
  });
  return h("div", { class: "saved" }, Object.entries(FROZEN.incidents).map(([id, report]) => h("details", { class: "card", id },
    h("summary", {}, `${id} ${report.title}`), incidentHead(report), sentences(report), ...incidentParts(report))));
}
