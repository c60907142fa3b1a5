// A producer that is not Python: a public Celery client (celery-node) submits, plain Redis is polled.
// node submit_and_poll.js REDIS_URL REQUESTS.jsonl > results.jsonl
"use strict";

const { readFileSync } = require("fs");
const { randomUUID } = require("crypto");
const celery = require("celery-node");
const Redis = require("ioredis");

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function submit(redis, url, lines) {
  const jobId = `s0-${randomUUID()}`;
  const key = `millrace:{s0}:j:${jobId}`;
  await redis.hset(`${key}:in`, Object.fromEntries(lines.entries())); // index -> line
  await redis.expire(`${key}:in`, 3600); // should no worker ever take the job
  const client = celery.createClient(url, url, "millrace");
  const submitTask = client.createTask("millrace.submit");
  // A message may get lost: it is sent until a worker has the job. One that comes twice does no harm.
  for (let waitMs = 1000; !(await redis.exists(`${key}:job`)); waitMs = Math.min(2 * waitMs, 60000)) {
    submitTask.applyAsync([jobId], { n: lines.length });
    await sleep(waitMs);
  }
  await client.disconnect();
  return key;
}

async function* records(redis, key) {
  for (let cursor = 0; ; ) {
    const state = await redis.hget(`${key}:job`, "st"); // asked first: no record is missed
    const indices = await redis.lrange(`${key}:ord`, cursor, cursor + 499);
    if (indices.length) {
      yield* await redis.hmget(`${key}:res`, ...indices);
      cursor += indices.length;
    } else if (state !== "queued" && state !== "running") {
      return;
    } else {
      await sleep(500);
    }
  }
}

async function main(url, path) {
  const redis = new Redis(url);
  const lines = readFileSync(path, "utf8").split("\n").filter((line) => line.trim());
  const key = await submit(redis, url, lines);
  for await (const record of records(redis, key)) {
    console.log(record);
  }
  console.error(await redis.hget(`${key}:job`, "st"));
  await redis.quit();
}

main(...process.argv.slice(2));
