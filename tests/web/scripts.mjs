// Runs the scripts of the page over elements that only say what they are made of, and prints what
// is drawn.
//
//     node scripts.mjs SCRIPT...
import { readFileSync } from "node:fs";
import vm from "node:vm";

const document = { querySelector: () => ({ contains: () => false }), addEventListener() {} };
const context = vm.createContext({
  document, performance, URLSearchParams, IntersectionObserver: class {}, innerWidth: 900,
  getSelection: () => ({ isCollapsed: true }), setInterval() {}, setTimeout: () => 1, clearTimeout() {},
  FROZEN: null, RUN: "r", COLUMNS: { step: 1 }, shown: new URLSearchParams(), remember() {}, failed() {},
});
for (const script of process.argv.slice(2)) vm.runInContext(readFileSync(script, "utf8"), context);
context.h = (tag, attributes, ...children) => ({ tag, attributes, children, append() {}, replaceChildren() {}, setAttribute() {} });
context.svg = context.h;
context.share = () => {};
context.listen = (run, known, take) => (context.take = take);

const place = () => ({ replaceChildren(...children) { this.children = children; } });
const run = {
  run: "r", path: "/r", step: -1, ranks: [], needs: [], incidents: [], drills: [], tags: [],
  phase: "constructor", policy: "p", mode: "m", state: "running", problem: "cannot be read",
  metrics: {}, frames: {}, boards: {}, missing: {}, checkpoints: [], actions: [], rule_states: {}, muted: {},
  own_s: {}, slow: null,
};
const view = {
  changed: [], charts: [], axis: "step", rank: "all", moved() {}, load: async () => {},
  show(charts) { this.charts = charts; },
};
const [bar, area] = [place(), place()];
const redraw = context.boards(view, run, bar, area);
const before = JSON.stringify(area.children);
context.follow(view, run, { update() {} }, redraw);
context.take({ decisions: [], metrics: { loss: { name: "Loss" } }, frames: { 0: 1, 1: 1 }, boards: { icu: ["loss"] } });
const hasRanks = () => JSON.stringify(context.controls(view, ["0", "1"])).includes('"rank ');
const live = hasRanks();
Object.assign(context, { FROZEN: { left_out: [] } });
view.rank = "all";
const facts = { ...run, silenced: {}, rules: [], state: "running" };
const sections = new (vm.runInContext("Sections", context))(facts);
const element = (text) => ({ text, contains: () => false, querySelectorAll: () => [], replaceWith() {} });
for (const draw of [context.operate, context.rules, context.verdict]) {
  sections.add((seen) => element(JSON.stringify(draw(seen))));
}
const drawn = (text) => sections.parts.map((part) => part.element.text.includes(text));
const later = [{ rule_states: { "p.rule": "firing" } }, { ending: { kind: "lost", text: "t", facts: [] } }, { cache: "frames were removed" }, { tags: ["baseline"] }];
for (const changed of later) sections.update(Object.assign(facts, changed) && changed);
const opened = { step: 1, wall: null };
const long = { opened: { step: 152 }, what: { onset: { step: 150 } }, series: { window: [90, 186] } };
const open = vm.runInContext("View", context).prototype.ranges.call(
  { at: ({ step }) => step, full: { max: 1 }, range: () => ({ max: 300 }) }, { step: 150, attempt: 0 });
console.log(JSON.stringify({
  before,
  charts: view.charts.map((chart) => chart.name),
  checks: JSON.stringify(context.checkpoints({ actions: [], checkpoints: [{ state: "valueOf", problems: [] }] })),
  suspect: JSON.stringify(context.checkpoints({ actions: [], checkpoints: [{ state: "verified", suspect: "not for going back", problems: [] }] })),
  head: JSON.stringify(context.incidentHead({ id: "inc-1", opened, run: {}, state: "OPEN" })),
  redrawn: [drawn("p.rule"), drawn(" at the end"), drawn("frames were removed"), drawn("baseline")],
  rolled: JSON.stringify(context.sparkline([3, 2, 1], [0.5])),
  around: [context.stepsAround({ ...long, closed: { step: 277 } }, 400), context.stepsAround(long, 9000)],
  open,
  outcomes: [{ state: "RECOVERED" }, { state: "OPEN", unsettled: true }].map(vm.runInContext("outcome", context)),
  ranks: [live, hasRanks(), view.rank],
  verdict: JSON.stringify(context.verdict(run)),
}));
