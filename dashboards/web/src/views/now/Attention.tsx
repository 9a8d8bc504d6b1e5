import { IconAlertTriangle, IconCircleCheck, IconInfoCircle } from "@tabler/icons-react";

import type { Notice } from "../../api/types";
import { Panel } from "../../parts/Panel";
import { linkTo } from "../../route";

const LOOKS = {
  serious: { icon: IconAlertTriangle, color: "bad" },
  warning: { icon: IconAlertTriangle, color: "warn" },
  info: { icon: IconInfoCircle, color: "dim" },
};

/** What a person should look at, the most serious first. */
export function Attention({ notices }: { notices: readonly Notice[] }) {
  return (
    <Panel title="Needs attention">
      <ul className="attention">
        {notices.length === 0 && (
          <li>
            <IconCircleCheck size={18} color="var(--good)" />
            <span>Nothing does.</span>
          </li>
        )}
        {notices.map((notice, place) => (
          <One key={place} notice={notice} />
        ))}
      </ul>
    </Panel>
  );
}

function One({ notice }: { notice: Notice }) {
  const { icon: Icon, color } = LOOKS[notice.level];
  return (
    <li>
      <Icon size={18} color={`var(--${color})`} aria-label={notice.level} />
      <span className="wrap">
        {notice.text}{" "}
        {notice.view != null && (
          <a href={linkTo(notice.view, { engine: notice.engine })}>See {notice.view}</a>
        )}
      </span>
    </li>
  );
}
