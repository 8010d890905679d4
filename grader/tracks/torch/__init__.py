"""Python submissions: ranks driven through the agent."""
