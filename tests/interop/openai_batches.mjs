// OpenAI's own client, of which nothing is set but these two: node openai_batches.mjs BASE_URL API_KEY FILE MODEL
// MODEL is one that jobs may wait for and that nobody serves, so that a batch of it is there to be cancelled. Uploads, creates, polls, downloads, lists, cancels and deletes; prints what came of it as JSON.
import fs from "node:fs";
import OpenAI, { NotFoundError, toFile } from "openai";

const [baseURL, apiKey, path, waitedFor] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey });
const upload = () => client.files.create({ file: fs.createReadStream(path), purpose: "batch" });
const create = (file) =>
  client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
const ended = async (batch) => {
  for (;;) {
    const found = await client.batches.retrieve(batch.id);
    if (["completed", "failed", "expired", "cancelled"].includes(found.status)) return found;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
};

const file = await upload();
const sameFile = await client.files.retrieve(file.id);
const sent = await (await client.files.content(file.id)).text();
const done = await ended(await create(file));
const output = await (await client.files.content(done.output_file_id)).text();

const waiting = await client.files.create({
  file: await toFile(Buffer.from(sent.replaceAll('"fake"', JSON.stringify(waitedFor))), "waiting.jsonl"),
  purpose: "batch",
});
const second = await create(waiting).then((batch) => client.batches.cancel(batch.id));
await client.files.delete(waiting.id);
const cancelled = await ended(second);

const batches = [];
for await (const batch of client.batches.list({ limit: 1 })) batches.push(batch.id);
const files = [];
for await (const listed of client.files.list()) files.push(listed.id);
const models = (await client.models.list()).data.map((model) => model.id);

const deleted = await client.files.delete(file.id);
const gone = await client.files.retrieve(file.id).then(() => null, (error) => error);
const conflict = await client.batches.cancel(done.id).then(() => null, (error) => error.status);

console.log(JSON.stringify({
  file, sameFile, sent, done, output, cancelled, batches, files, models, deleted, conflict,
  isGone: gone instanceof NotFoundError,
}));
