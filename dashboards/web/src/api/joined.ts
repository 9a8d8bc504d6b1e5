import { MOST_REQUESTS } from "./limits";
import type { News, Requests, RequestView, TokenHistory } from "./types";

type Columns = { [Name in keyof TokenHistory]: TokenHistory[Name] };

/** A history with its last steps told again and new ones behind them; `steps` is its length. */
export function joined(
  before: TokenHistory | undefined,
  last: TokenHistory,
  steps: number,
): TokenHistory {
  const [first] = last.starts;
  if (before === undefined || first === undefined || last.starts.length >= steps) return last;
  const old = before.starts.findIndex((start) => start > first - last.step_s / 2);
  const whole: Record<string, unknown> = { ...last };
  for (const [name, column] of Object.entries(last as Columns)) {
    if (!Array.isArray(column)) continue;
    const known = before[name as keyof TokenHistory] as unknown[];
    whole[name] = [...known.slice(0, old < 0 ? known.length : old), ...column].slice(-steps);
  }
  return whole as unknown as TokenHistory;
}

/** Requests, the newest first, with those that news tell of in their places. */
export function joinedRequests(before: readonly RequestView[], news: News): Requests {
  const known = new Map((news.is_gap ? [] : before).map((each) => [each.id, each]));
  for (const each of news.requests) known.set(each.id, each);
  const all = [...known.values()].sort((one, other) => other.id - one.id);
  const requests = all.slice(0, MOST_REQUESTS);
  const oldest = requests.length < MOST_REQUESTS ? undefined : requests.at(-1);
  return { at: news.at, requests, next: oldest?.id ?? null, since: null };
}
