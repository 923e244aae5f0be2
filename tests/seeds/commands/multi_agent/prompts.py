"""Prompts of the agents."""


def solver_prompt(problem):
    return f"Solve: {problem}"


def rewriter_prompt(problem, solutions):
    return f"Rewrite: {problem} " + " ".join(str(solution) for solution in solutions)


def selector_prompt(problem, solutions):
    return f"Select: {problem} " + " ".join(f"{n + 1}. {solution}" for n, solution in enumerate(solutions))
