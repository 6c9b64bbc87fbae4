// Opens each page as a person would, and says what is wrong with it; `drive.py` starts it.
//
//     node check.mjs BASE FOLDER < jobs.json
//
// A job: {name, path, width, scheme, browser}. In Firefox (WebDriver BiDi) there is neither a colour
// scheme nor axe, which needs to get past the page's own policy. FOLDER gets a screenshot of each. Prints a line for each job
// that failed, and exits with 1 if there is one.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [base, folder] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const puppeteer = require("puppeteer-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const jobs = JSON.parse(readFileSync(0, "utf8"));
const GRAVE = ["serious", "critical"];

const browsers = {};
for (const [browser, executablePath] of Object.entries(JSON.parse(process.env.BROWSERS))) {
  const args = browser === "chrome" ? ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] : [];
  browsers[browser] = await puppeteer.launch({ browser, executablePath, args });
}
let failed = 0;
for (const job of jobs) {
  const wrong = await open(job).catch((error) => [String(error)]);
  failed += wrong.length > 0;
  if (wrong.length) console.log(`${job.name}: ${wrong.join("; ")}`);
}
for (const browser of Object.values(browsers)) await browser.close();
console.log(`${jobs.length} pages, ${failed} with something wrong`);
process.exit(failed ? 1 : 0);

async function open({ name, path, width, scheme, browser }) {
  const wrong = [];
  const page = await browsers[browser].newPage();
  page.on("console", (message) => wrong.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => wrong.push(`error: ${error.message}`));
  page.on("request", (request) => {
    if (![base, "data:", "file:"].some((own) => request.url().startsWith(own))) {
      wrong.push(`asks another host: ${request.url()}`);
    }
  });
  await page.setViewport({ width, height: 900, isMobile: width < 500 });
  if (browser === "chrome") await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.goto(path.startsWith("file:") ? path : base + path, { waitUntil: "domcontentloaded", timeout: 180000 });
  if (!/(record|report).html$/.test(path)) {
    await page.waitForSelector("main[data-ready=curves]", { timeout: 60000 }).catch(async () => {
      wrong.push(`not ready: ${await page.evaluate(() => document.body.innerText.slice(0, 200))}`);
    });
  }
  await page.evaluate(async () => {
    for (let y = 0; y < document.documentElement.scrollHeight; y += 600) {
      scrollTo(0, y); // charts are drawn when they come into view
      await new Promise((done) => setTimeout(done, 50));
    }
    scrollTo(0, 0);
    await new Promise((done) => setTimeout(done, 150));
  });
  await page.screenshot({ path: `${folder}/${name}.png`, fullPage: true });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (wide > 0) wrong.push(`${wide} px too wide`);
  if (browser === "chrome") wrong.push(...await accessibility(page));
  await page.close();
  return wrong;
}

async function accessibility(page) {
  const session = await page.createCDPSession(); // past the page's own policy
  await session.send("Runtime.evaluate", { expression: axe });
  const violations = await page.evaluate(async () => {
    const { violations } = await window.axe.run(document, { resultTypes: ["violations"] });
    return violations.map(({ impact, id, nodes }) => [impact, `${id}: ${nodes[0].html.slice(0, 120)}`]);
  });
  return violations.filter(([impact]) => GRAVE.includes(impact)).map((pair) => pair.join(" "));
}
