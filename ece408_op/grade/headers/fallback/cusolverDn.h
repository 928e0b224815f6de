// Found only where the toolkit has no such header: for submissions that include it and use nothing of it.
