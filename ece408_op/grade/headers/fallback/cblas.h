// Found only where the system has no such header: for submissions that include it and use nothing of it.
