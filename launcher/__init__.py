"""Where and how a recipe runs: plan, agent, supervision, back ends and the `muster` command."""
