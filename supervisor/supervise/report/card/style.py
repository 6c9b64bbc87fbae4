"""The look of `incident.html`."""

CSS = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#59636e;--edge:#d5dae0;--soft:#f4f6f8;--line:#0b62c4;

--red:#b42318;--amber:#8a5a00;--green:#116329}
@media (prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e6eaef;--dim:#9aa5b1;--edge:#333b45;
--soft:#1d232a;--line:#6cb0ff;--red:#ff8a80;--amber:#f0b44a;--green:#6fce86}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1.25rem 1rem 3rem}
h1{font-size:1.55rem;line-height:1.25;margin:.3rem 0;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--edge);padding-bottom:.25rem}
small,.sub,footer{color:var(--dim);font-size:.85rem;font-weight:400}
.sub,.tags{margin:.2rem 0;overflow-wrap:anywhere}
.sev,.state{display:inline-block;border:1.5px solid currentColor;border-radius:.3rem;
padding:0 .45rem;
font-size:.85rem}
.sev0,.bad{color:var(--red)}.sev1,.busy{color:var(--amber)}.sev2{color:var(--dim)}.good{
color:var(--green)}
.card{display:grid;grid-template-columns:4.5rem 1fr;gap:.45rem .75rem;background:var(--soft);
border:1px solid var(--edge);border-radius:.5rem;padding:.9rem 1rem;margin:1rem 0}
dt{font-weight:600;color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:1fr 1fr;gap:1.2rem 1.5rem}
.plot{margin:0;min-width:0}.plot.tall{grid-column:1/-1}
figcaption{font-weight:600;font-size:.9rem}
.frame{position:relative;height:7rem;border:1px solid var(--edge);border-radius:.3rem;
margin:.2rem 0 0}
.tall .frame{height:13rem}
.frame svg{position:absolute;inset:0;width:100%;height:100%}
.line,.opened,.back,.limit{fill:none;vector-effect:non-scaling-stroke}
.line{stroke:var(--line);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.left{stroke:var(--red)}
line.opened{stroke:var(--red);stroke-width:1.5}
line.back{stroke:var(--green);stroke-width:1.5;stroke-dasharray:5 4}
.limit{stroke:var(--dim);stroke-width:1;stroke-dasharray:2 4}
.range{color:var(--dim);font-size:.75rem;font-weight:400;float:right}
.nan{position:absolute;top:0;transform:translateX(-50%);color:var(--red);
font:700 .8rem/1 sans-serif}
.labels span{display:block;width:fit-content;position:relative;font-size:.78rem;line-height:1.35;
padding-left:.3rem;border-left:2px solid}
.labels span.end{transform:translateX(-100%);border-left:0;border-right:2px solid;
padding:0 .3rem 0 0}
span.opened{color:var(--red)}span.back{color:var(--green)}
.axis{display:flex;justify-content:space-between;color:var(--dim);font-size:.75rem}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;vertical-align:top;padding:.3rem .6rem .3rem 0;
border-bottom:1px solid var(--edge);
overflow-wrap:anywhere}
th{color:var(--dim);font-weight:600}
td[data-of="Step"],th{white-space:nowrap}
.times td:nth-child(-n+2){white-space:nowrap;color:var(--dim);font-variant-numeric:tabular-nums}
pre,code{font:.82rem/1.45 ui-monospace,monospace}
pre{background:var(--soft);border:1px solid var(--edge);border-radius:.4rem;padding:.6rem .75rem;
white-space:pre-wrap;overflow-wrap:anywhere}
code{overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--dim);font-size:.88rem}
ul{padding-left:1.2rem}
footer{margin-top:2.5rem;border-top:1px solid var(--edge);padding-top:.5rem}
@media (max-width:40rem){.plots{grid-template-columns:1fr}.card{grid-template-columns:1fr;gap:.1rem}
dd{margin-bottom:.5rem}h1{font-size:1.3rem}.tall .frame{height:11rem}
table:not(.times) thead{display:none}
table:not(.times) td{display:block;border:0;padding:.05rem 0}
table:not(.times) td[data-of]:before{content:attr(data-of) " ";color:var(--dim)}
table:not(.times) td[data-of=""]:before{content:""}
table:not(.times) tr{display:block;border-bottom:1px solid var(--edge);padding:.4rem 0}
.times tr{display:grid;grid-template-columns:auto auto 1fr;column-gap:.6rem;
border-bottom:1px solid var(--edge);padding:.3rem 0}
.times td{border:0;padding:0}.times td:nth-child(4){grid-column:1/-1}}
@media print{:root{--bg:#fff;--fg:#000;--soft:#fff;--dim:#444;--edge:#bbb;--line:#000;}
main{max-width:none;padding:0}body{font-size:11pt}
.plot,.card,tr{break-inside:avoid}h2{break-after:avoid}}
"""
