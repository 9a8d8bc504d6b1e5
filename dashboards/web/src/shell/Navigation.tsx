import { linkTo } from "../route";
import type { View } from "./views";

export function Navigation(props: { views: readonly View[]; current: string }) {
  return (
    <nav className="navigation" aria-label="Views">
      <a className="brand" href={linkTo("now")}>
        <Mark />
        <span>kvgraph</span>
      </a>
      <ul>
        {props.views.map(({ id, title, icon: Icon }) => (
          <li key={id}>
            <a href={linkTo(id)} aria-current={id === props.current ? "page" : undefined}>
              <Icon size={18} stroke={1.7} />
              <span>{title}</span>
            </a>
          </li>
        ))}
      </ul>
    </nav>
  );
}

function Mark() {
  return (
    <svg width="26" height="26" viewBox="0 0 32 32" aria-hidden="true">
      <g stroke="var(--dim)" strokeWidth="2" opacity="0.6">
        <path d="M8 8l8 8M16 16l9-6M16 16l-4 9M12 25l11-1" />
      </g>
      <circle cx="8" cy="8" r="4" fill="var(--axioms)" />
      <circle cx="25" cy="10" r="3.5" fill="var(--context)" />
      <circle cx="16" cy="16" r="5" fill="var(--accent)" />
      <circle cx="12" cy="25" r="3.5" fill="var(--rules)" />
      <circle cx="24" cy="24" r="3" fill="var(--generation)" />
    </svg>
  );
}
