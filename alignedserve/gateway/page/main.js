// Polls the server once per second, and shows its state.

import { Unauthorized, get, getCluster, getHealth } from "./api.js";
import { Chat } from "./chat.js";
import { History } from "./history.js";
import { Jobs } from "./jobs.js";
import { KeyForm } from "./key_form.js";
import { Memory } from "./memory.js";
import { Poll } from "./poll.js";
import { Processes } from "./processes.js";
import { readingOf } from "./reading.js";
import { Samples } from "./samples.js";
import { showAbout, showAway, showHealth } from "./state.js";
import { Traffic } from "./traffic.js";

const EVERY_MS = 1000;
const MAX_WAIT_MS = 8000;

const history = new History();
const traffic = new Traffic();
const processes = new Processes();
const memory = new Memory();
const jobs = new Jobs();
const poll = new Poll(look);
const keyForm = new KeyForm(() => poll.now());
const chat = new Chat(() => poll.now(), () => model?.id);
let waitMs = EVERY_MS;
// The model from /v1/models. null: unknown, or the server was away since.
let model = null;

async function look() {
  try {
    await lookAtAll();
    waitMs = EVERY_MS;
  } catch (error) {
    if (error instanceof Unauthorized) {
      keyForm.ask();
      return null;
    }
    model = null;
    waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
    showAway(error, waitMs);
  }
  return waitMs;
}

async function lookAtAll() {
  const health = await getHealth();
  showHealth(health);
  const { serverTime } = health;
  const [text, cluster] = await Promise.all([getMetrics(), getCluster(), jobs.look(serverTime), findModel()]);
  keyForm.accepted();
  history.add(readingOf(new Samples(text), performance.now(), history.latest, health.status !== "unavailable"));
  chat.showModel();
  showAbout(model, cluster, serverTime);
  traffic.show(history);
  processes.show(cluster, serverTime);
  memory.show(cluster, history);
}

async function getMetrics() {
  return (await get("/metrics")).text();
}

async function findModel() {
  model ??= (await (await get("/v1/models")).json()).data[0];
}

poll.now();
