import { Skeleton } from "@mantine/core";
import type { ReactNode } from "react";

import type { ApiError } from "../api/client";
import type { Resource } from "../api/resource";

/** Nothing to show, and what to do so that there is. */
export function Empty(props: { title: string; children: ReactNode }) {
  return (
    <div className="state">
      <strong>{props.title}</strong>
      <p>{props.children}</p>
    </div>
  );
}

/** What went wrong, in the sidecar's own words. */
function Failure(props: { error: ApiError }) {
  return (
    <div className="state" role="alert">
      <strong>{titleOf(props.error.status)}</strong>
      <p className="wrap">{props.error.message}</p>
    </div>
  );
}

/** Shows the answer once it is there; before that its shape, or why there is none. */
export function Await<T>(props: { of: Resource<T>; children: (data: T) => ReactNode }) {
  const { data, error } = props.of;
  if (data !== undefined) return props.children(data);
  if (error !== undefined) return <Failure error={error} />;
  return (
    <div aria-busy="true" aria-label="Loading">
      <Skeleton height={28} width="45%" mb={16} />
      <Skeleton height={140} mb={16} />
      <Skeleton height={140} />
    </div>
  );
}

function titleOf(status: number): string {
  if (status === 0) return "The sidecar is away";
  if (status === 404) return "Not known here";
  return status === 503 ? "The sidecar is busy" : "This could not be shown";
}
