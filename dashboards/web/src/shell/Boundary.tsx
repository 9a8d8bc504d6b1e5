import { Component, type ReactNode } from "react";

import { Empty } from "../parts/states";

/** Keeps the rest of the page when a view fails. */
export class Boundary extends Component<{ children: ReactNode }, { error: Error | null }> {
  override state = { error: null as Error | null };

  static getDerivedStateFromError(error: Error) {
    return { error };
  }

  override render() {
    const { error } = this.state;
    if (error === null) return this.props.children;
    return (
      <Empty title="This view failed">
        Reload the page. If it fails again, the page and its sidecar may be of different versions:
        restart the sidecar. It said: <code>{error.message}</code>
      </Empty>
    );
  }
}
