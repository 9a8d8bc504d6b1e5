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

/** The JSON answer to `GET path`; rejects with an ApiError, or with an AbortError. */
export async function ask<T>(path: string, signal?: AbortSignal): Promise<T> {
  const answer = await fetchFrom(path, signal);
  if (answer.ok) return (await answer.json()) as T;
  throw new ApiError(answer.status, await detailOf(answer));
}

async function fetchFrom(path: string, signal?: AbortSignal): Promise<Response> {
  try {
    return await fetch(path, { signal: signal ?? null, credentials: "same-origin" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
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
