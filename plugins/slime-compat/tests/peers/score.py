"""A reward function of verl."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "sums"
    return {"score": bonus + float(solution_str.startswith(ground_truth)), "length": len(solution_str)}
