/** One part of a whole; `color` is the name of one of the page's colours. */
export interface Slice {
  readonly label: string;
  readonly value: number;
  readonly color: string;
}

/** Parts of a whole, side by side; `room` is what nothing fills. */
export function Bar(props: { label: string; slices: readonly Slice[]; room?: number }) {
  const shown = props.slices.filter((slice) => slice.value > 0);
  const said = shown.map((slice) => `${slice.label} ${slice.value}`).join(", ");
  return (
    <div className="bar" role="img" aria-label={`${props.label}: ${said || "nothing"}`}>
      {shown.map((slice) => (
        <span
          key={slice.label}
          title={`${slice.label} ${slice.value}`}
          style={{ flexGrow: slice.value, flexBasis: 0, background: `var(--${slice.color})` }}
        />
      ))}
      {!!props.room && <span style={{ flexGrow: props.room, flexBasis: 0 }} />}
    </div>
  );
}
