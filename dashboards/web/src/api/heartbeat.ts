import { useSyncExternalStore } from "react";

import { joined, joinedRequests } from "./joined";
import type { News, Requests } from "./types";

export type Connection = "connecting" | "live" | "lost" | "locked";

const TICK_MS = 1000;
const SILENCE_MS = 3000; // without the stream: a slow beat, so that a restarted sidecar is found

/**
 * Whether the sidecar is there, its latest news, and the beat at which views ask again.
 *
 * The sidecar's event stream sets the beat; the browser resumes it with `Last-Event-ID`. Where the
 * stream is away a slow clock beats instead.
 */
class Heartbeat {
  private readonly listeners = new Set<() => void>();
  private stream: EventSource | null = null;
  private clock: ReturnType<typeof setInterval> | undefined;
  private connection: Connection = "connecting";
  private beats = 0;
  private struckAt = 0;
  private latest: News | null = null;
  private recent: Requests | null = null;
  private begins = true; // the next news is the first on their connection

  readonly subscribe = (listener: () => void) => {
    if (this.listeners.size === 0) this.start();
    this.listeners.add(listener);
    return () => {
      this.listeners.delete(listener);
      if (this.listeners.size === 0) this.stop();
    };
  };

  readonly beat = () => this.beats;
  readonly state = () => this.connection;
  readonly news = () => this.latest;
  readonly requests = () => this.recent;

  /** What the status of an answer says of the connection; 0: there was no answer. */
  saw(status: number) {
    const next = status === 401 ? "locked" : status === 0 ? "lost" : "live";
    if (next === this.connection) return;
    this.connection = next;
    if (next !== "live") this.latest = null;
    this.tell();
  }

  private start() {
    this.open();
    this.clock = setInterval(() => this.tick(), TICK_MS);
    document.addEventListener("visibilitychange", this.strike);
  }

  private stop() {
    this.stream?.close();
    this.stream = null;
    clearInterval(this.clock);
    document.removeEventListener("visibilitychange", this.strike);
  }

  private tick() {
    if (performance.now() - this.struckAt < SILENCE_MS) return;
    this.strike();
    if (this.stream?.readyState === EventSource.CLOSED && this.connection === "live") this.open();
  }

  private open() {
    this.stream?.close();
    this.begins = true;
    this.stream = new EventSource("v1/events");
    this.stream.addEventListener("news", (event: MessageEvent<string>) => {
      const news = JSON.parse(event.data) as News;
      const history = joined(this.latest?.now.history, news.now.history, news.steps);
      this.latest = { ...news, now: { ...news.now, history } };
      const known = this.begins ? [] : (this.recent?.requests ?? []);
      if (this.begins || news.is_gap || news.requests.length > 0)
        this.recent = joinedRequests(known, news);
      this.begins = false;
      this.strike();
    });
    this.stream.onerror = () => {
      this.latest = null;
    };
  }

  private readonly strike = () => {
    if (document.hidden) return;
    this.struckAt = performance.now();
    this.beats += 1;
    this.tell();
  };

  private tell() {
    for (const listener of this.listeners) listener();
  }
}

export const heartbeat = new Heartbeat();

export function useBeat(): number {
  return useSyncExternalStore(heartbeat.subscribe, heartbeat.beat);
}

export function useConnection(): Connection {
  return useSyncExternalStore(heartbeat.subscribe, heartbeat.state);
}

/** The newest requests as the stream told of them, the newest first; null before it did. */
export function useRequests(): Requests | null {
  return useSyncExternalStore(heartbeat.subscribe, heartbeat.requests);
}

/** What the stream said last; null while it is away. */
export function useNews(): News | null {
  return useSyncExternalStore(heartbeat.subscribe, heartbeat.news);
}
