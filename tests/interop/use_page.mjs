// Uses the page as a person does, in Chromium, and looks at it: node use_page.mjs URL KEY HELD FILE WAITING BROWSER PICTURES
// The job of HELD stands still half-way until it is cancelled; the lines of WAITING are for a model that nobody serves.
// Signs in, submits files by dropping them, looks at a run, cancels jobs, retries one; prints what it saw as JSON.
import fs from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [url, key, held, path, waiting, executablePath, pictures] = process.argv.slice(2);
const axe = fs.readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const seen = { faults: [], problems: [], wide: [], during: {}, kv: {} };

async function page(options) {
  // axe is put in by the browser's debugger, which the page's policy does not bind.
  const context = await browser.newContext(options);
  const found = await context.newPage();
  found.on("console", (message) => { if (message.type() === "error") seen.problems.push(message.text()); });
  found.on("pageerror", (error) => seen.problems.push(String(error)));
  found.on("dialog", (dialog) => dialog.accept());
  return found;
}

async function lookAt(tab, name) {
  await tab.screenshot({ path: `${pictures}/${name}.png`, fullPage: true });
  await tab.evaluate(axe);
  const { violations } = await tab.evaluate(() => globalThis.axe.run());
  for (const fault of violations) {
    seen.faults.push([name, fault.impact, fault.id, fault.nodes.map((node) => node.html).slice(0, 3)]);
  }
  const isWide = await tab.evaluate(() => document.documentElement.scrollWidth > innerWidth + 1);
  if (isWide) seen.wide.push(name);
}

async function signIn(tab) {
  await tab.goto(url);
  await tab.getByLabel("Key").fill(key);
  await tab.keyboard.press("Enter");
  await tab.waitForURL(`${url}/`);
}

async function dropFile(tab, from, name) {
  const text = fs.readFileSync(from, "utf8");
  const transfer = await tab.evaluateHandle(([lines, called]) => {
    const dropped = new DataTransfer();
    dropped.items.add(new File([lines], called, { type: "application/jsonl" }));
    return dropped;
  }, [text, name]);
  await tab.dispatchEvent("[data-drop]", "drop", { dataTransfer: transfer });
  await tab.waitForURL(/\/jobs\/s0-/);
  return new URL(tab.url()).pathname.replace("/jobs/", "");
}

const state = (tab, text) => tab.locator(".state", { hasText: text }).first().waitFor({ timeout: 90_000 });

// What a page says of the job that is held, in whose part `within`: its state, percent and rate.
async function noteRun(tab, name, within, rate) {
  const part = tab.locator(within);
  const numbers = [await part.locator("progress").getAttribute("value"), (await rate.textContent()).match(/[0-9.]+/)?.[0]];
  seen.during[name] = [await part.locator(".state").textContent(), ...numbers.map(Number)];
}

async function lookAtRun(tab, name) {
  await tab.goto(`${url}/jobs/${seen.held}`);
  await tab.locator(`#output-${seen.held}`).waitFor({ timeout: 90_000 }); // there are answers
  await noteRun(tab, `${name}-job`, "#job", tab.locator("#job dd").first());
  await lookAt(tab, `${name}-job-during-run`);
  await tab.goto(url);
  const kv = tab.locator('#workers progress:not([value="0"])'); // the worker says so with its next heartbeat
  await kv.waitFor({ timeout: 90_000 });
  seen.kv[name] = [Number(await kv.getAttribute("value")), Number(await kv.getAttribute("max"))];
  const row = `#jobs tr:has(#job-${seen.held})`;
  await noteRun(tab, name, row, tab.locator(`${row} td[data-name=Rate]`));
  await lookAt(tab, `${name}-during-run`);
}

const desk = await page({ viewport: { width: 1280, height: 800 }, colorScheme: "light" });
const night = await page({ viewport: { width: 1280, height: 800 }, colorScheme: "dark" });
const phone = await page({ viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true, deviceScaleFactor: 2 });
await desk.goto(url);
await lookAt(desk, "sign-in");
await signIn(desk);
await lookAt(desk, "empty");

// A job that waits is cancelled, by the keyboard alone.
seen.cancelled = await dropFile(desk, waiting, "waiting.jsonl");
await desk.locator(`#cancel-${seen.cancelled}`).focus();
await desk.keyboard.press("Enter");
await state(desk, "cancelled");

await desk.locator(`#retry-${seen.cancelled}`).click();
await desk.waitForURL((to) => /\/jobs\/s0-/.test(to.pathname) && !to.pathname.endsWith(seen.cancelled));
seen.retried = new URL(desk.url()).pathname.replace("/jobs/", "");

// One is cancelled half-way, where it stands still, by the list of jobs.
await desk.goto(url);
seen.held = await dropFile(desk, held, "half-way.jsonl");
await signIn(night);
await signIn(phone);
await lookAtRun(night, "dark");
await lookAtRun(phone, "phone");
await lookAtRun(desk, "light");
await desk.locator(`#cancel-${seen.held}`).click();
await desk.waitForURL(`${url}/jobs/${seen.held}`);
await state(desk, "cancelled");

// Another runs to its end: the page shows that without being loaded.
await desk.goto(url);
seen.ran = await dropFile(desk, path, "tickets.jsonl");
await desk.evaluate(() => { globalThis.isSamePage = true; });
await state(desk, "completed");
seen.wasLive = await desk.evaluate(() => globalThis.isSamePage === true);
seen.note = await desk.locator("#live").textContent();
await lookAt(desk, "job");
const [download] = await Promise.all([desk.waitForEvent("download"), desk.locator(`#output-${seen.ran}`).click()]);
seen.output = fs.readFileSync(await download.path(), "utf8");

await desk.goto(url);
await desk.locator("#workers progress").waitFor({ timeout: 60_000 });
await lookAt(desk, "light");
await desk.goto(`${url}/docs`);
await lookAt(desk, "docs");

await night.goto(url);
await lookAt(night, "dark");
await night.goto(`${url}/jobs/${seen.cancelled}`);
await lookAt(night, "dark-job");

await phone.goto(url);
await lookAt(phone, "phone");
await phone.goto(`${url}/jobs/${seen.cancelled}`);
await lookAt(phone, "phone-job");

seen.cookies = (await desk.context().cookies()).map(({ name, httpOnly, sameSite }) => [name, httpOnly, sameSite]);
seen.readable = await desk.evaluate(() => document.cookie);
await desk.goto(url);
await desk.getByRole("button", { name: "Sign out" }).click();
await desk.waitForURL(`${url}/sign-in`);
await browser.close();
console.log(JSON.stringify(seen));
