import { ActionIcon, Tooltip, useComputedColorScheme, useMantineColorScheme } from "@mantine/core";
import { IconMoon, IconSun } from "@tabler/icons-react";

import { type Connection, useConnection } from "../api/heartbeat";
import type { View } from "./views";

const WORDS: Record<Connection, string> = {
  connecting: "connecting",
  live: "live",
  lost: "sidecar away, asking again",
  locked: "needs the token",
};

export function Header(props: { view: View }) {
  const connection = useConnection();
  return (
    <header className="head">
      <div>
        <h1>{props.view.title}</h1>
        <p>{props.view.question}</p>
      </div>
      <div className="right">
        <span className="pulse" data-state={connection} role="status">
          {WORDS[connection]}
        </span>
        <SchemeSwitch />
      </div>
    </header>
  );
}

function SchemeSwitch() {
  const { setColorScheme } = useMantineColorScheme();
  const other = useComputedColorScheme("dark") === "dark" ? "light" : "dark";
  return (
    <Tooltip label={`Make it ${other}`}>
      <ActionIcon
        variant="default"
        size="lg"
        aria-label={`Make it ${other}`}
        onClick={() => setColorScheme(other)}
      >
        {other === "light" ? <IconSun size={17} /> : <IconMoon size={17} />}
      </ActionIcon>
    </Tooltip>
  );
}
