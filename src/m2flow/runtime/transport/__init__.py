"""Links: the ways in which a payload gets from one lane to another, and what each costs."""
