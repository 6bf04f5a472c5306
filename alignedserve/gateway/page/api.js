// Requests to the server. The API key is sent in a header, never in a URL, and is kept until the tab is closed.

const NAME = "alignedserve-key";
const TIMEOUT_MS = 10000;

export const heldKey = () => sessionStorage.getItem(NAME);
export const holdKey = (key) => sessionStorage.setItem(NAME, key);
export const forgetKey = () => sessionStorage.removeItem(NAME);

export class Unauthorized extends Error {}

// The server answered with an error.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function get(path) {
  return checked(await ask(path, { signal: AbortSignal.timeout(TIMEOUT_MS) }));
}

export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return checked(await ask(path, { method: "POST", body: JSON.stringify(body), headers, signal }));
}

// Also returns the body of a 503, which has the reason.
export async function getHealth() {
  const response = await ask("/health", { signal: AbortSignal.timeout(TIMEOUT_MS) });
  const body = await response.json();
  return { ...body, serverTime: Date.parse(response.headers.get("date")) || Date.now() };
}

// Returns null while no router answers.
export async function getCluster() {
  try {
    return await (await get("/v1/cluster")).json();
  } catch (error) {
    if (error instanceof Refused && error.status === 503) return null;
    throw error;
  }
}

function ask(path, { headers = {}, ...options }) {
  const key = heldKey();
  if (key !== null) headers = { ...headers, Authorization: `Bearer ${key}` };
  return fetch(path, { ...options, headers, credentials: "omit" });
}

async function checked(response) {
  if (response.ok) return response;
  const message = await messageOf(response);
  if (response.status === 401) throw new Unauthorized(message);
  throw new Refused(response.status, message);
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
