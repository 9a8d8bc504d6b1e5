import { editToken } from "./editToken";

/** A question that was refused, or that nobody answered. */
export class ApiError extends Error {
  /** @param status The HTTP status; 0 where the sidecar did not answer at all. */
  constructor(
    readonly status: number,
    detail: string,
  ) {
    super(detail);
  }
}

/** Answers that carry an ETag, so that the same is neither sent nor parsed again. */
const kept = new Map<string, { readonly tag: string; readonly data: unknown }>();
const MOST_KEPT = 4;

/** Questions that were sent before anybody asked them. */
const early = new Map<string, Promise<Response>>();

/** Send a question that is about to be asked, so that its answer travels while the page starts. */
export function askEarly(path: string) {
  const answer = fetchFrom(path, {});
  answer.catch(() => {}); // whoever asks is told
  early.set(path, answer);
}

/** The JSON answer to a question or a change with a body; rejects with ApiError. */
export async function send<T>(
  method: "POST" | "PUT" | "DELETE",
  path: string,
  body: unknown,
): Promise<T> {
  const token = editToken();
  const headers = {
    "Content-Type": "application/json",
    ...(token === null ? {} : { "X-Kvgraph-Edit": token }),
  };
  const answer = await fetchFrom(path, { method, headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new ApiError(answer.status, await detailOf(answer));
  return (await answer.json()) as T;
}

/** The JSON answer to `GET path`, the same object while it is the same; rejects with ApiError. */
export async function ask<T>(path: string): Promise<T> {
  const known = kept.get(path);
  const headers = known === undefined ? {} : { "If-None-Match": known.tag };
  const answer = await (early.get(path) ?? fetchFrom(path, { headers }));
  early.delete(path);
  if (answer.status === 304 && known !== undefined) return known.data as T;
  if (!answer.ok) throw new ApiError(answer.status, await detailOf(answer));
  const data = (await answer.json()) as T;
  keep(path, answer.headers.get("ETag"), data);
  return data;
}

function keep(path: string, tag: string | null, data: unknown) {
  if (tag === null) return;
  kept.delete(path);
  kept.set(path, { tag, data });
  const [oldest] = kept.keys();
  if (kept.size > MOST_KEPT && oldest !== undefined) kept.delete(oldest);
}

async function fetchFrom(path: string, init: RequestInit): Promise<Response> {
  try {
    return await fetch(path, init);
  } catch {
    throw new ApiError(0, "The sidecar does not answer. It is asked again every few seconds.");
  }
}

async function detailOf(answer: Response): Promise<string> {
  try {
    const body: unknown = await answer.json();
    if (typeof body === "object" && body !== null && "detail" in body) return String(body.detail);
  } catch {
    // Not JSON: the status says enough.
  }
  return `The sidecar answered ${answer.status}.`;
}
