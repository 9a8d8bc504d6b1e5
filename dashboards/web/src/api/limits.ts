// How much of each log is shown at once; chosen.

/** As many as the sidecar's stream tells at first (`RECENT` in advisor/page/events.py). */
export const MOST_REQUESTS = 200;
export const MOST_EVICTIONS = 200;
/** As many as the sidecar tells of a session (`MOST_REQUESTS` in advisor/page/sessions.py). */
export const MOST_TURNS = 500;
