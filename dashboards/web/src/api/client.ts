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

/** The JSON answer to a question or a change with a body; rejects with ApiError. */
export async function send<T>(method: "POST" | "PUT", path: string, body: unknown): Promise<T> {
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
  const answer = await fetchFrom(path, { headers });
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
