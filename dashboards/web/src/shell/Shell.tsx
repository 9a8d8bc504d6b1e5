import "./shell.css";

import { useEffect } from "react";

import { useConnection } from "../api/heartbeat";
import { useRoute } from "../route";
import { Boundary } from "./Boundary";
import { Header } from "./Header";
import { Locked } from "./Locked";
import { Navigation } from "./Navigation";
import { useShownViews } from "./shown";

/** The frame around every view. */
export function Shell() {
  const { view: id } = useRoute();
  const views = useShownViews();
  const view = views.find((each) => each.id === id) ?? views[0];
  const connection = useConnection();

  useEffect(() => {
    document.title = view === undefined ? "kvgraph" : `${view.title} · kvgraph`;
  }, [view]);

  if (view === undefined) return null;
  const Show = view.show;
  return (
    <div className="shell">
      <a className="skip" href="#main" onClick={skip}>
        Skip to content
      </a>
      <Navigation views={views} current={view.id} />
      <div className="stage">
        <Header view={view} />
        {connection === "lost" && <Away />}
        <main id="main" tabIndex={0}>
          <Boundary key={view.id}>{connection === "locked" ? <Locked /> : <Show />}</Boundary>
        </main>
      </div>
    </div>
  );
}

function Away() {
  return (
    <p className="away wrap" role="status">
      The sidecar does not answer. This page asks again every few seconds; if the sidecar was
      restarted, it may have another address, which <code>kvgraph open</code> gives.
    </p>
  );
}

/** The address after `#` is the view: going to the content must not change it. */
function skip(event: { preventDefault(): void }) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}
